//! Chooses one of several configurations by a label of the node, in the order of NVIDIA's config-manager. Two watches, of one Node's metadata and of one ConfigMap (or a
//! folder instead): nothing else of the cluster is read.

use std::collections::BTreeMap;
use std::future::pending;
use std::str::FromStr;
use std::time::{Duration, Instant};

use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::files::{self, PathChanges};
use super::{Configs, PerNode, Sighting};
use crate::problem::nearest;

/// Seconds after which a watch is renewed, well before silence is taken for a dead connection.
const RENEW: u32 = 30;

/// The choice for a node without the label.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// The configuration of nodes without the label.
    pub default: Option<String>,
    /// The fallbacks without a default, in this order.
    pub fallbacks: Vec<Fallback>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// The configuration called `default`.
    Named,
    /// The only configuration, if there is exactly one.
    Single,
    /// None: defaults, environment and flags.
    Empty,
}

impl FromStr for Fallback {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "named" => Ok(Self::Named),
            "single" => Ok(Self::Single),
            "empty" => Ok(Self::Empty),
            other => Err(format!("{other:?} is no fallback; write named, single or empty")),
        }
    }
}

/// Why no configuration can be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    /// The named configuration does not exist.
    #[error("{by} names the configuration {name:?}, which is not there; {}", there_is(nearest.as_deref(), there))]
    Absent { by: &'static str, name: String, nearest: Option<String>, there: Vec<String> },
    /// No name is given and no fallback applies.
    #[error("nothing names a configuration and no fallback finds one; {}", there_is(None, there))]
    None { there: Vec<String> },
}

fn there_is(nearest: Option<&str>, there: &[String]) -> String {
    let near = nearest.map_or(String::new(), |name| format!("; did you mean {name:?}?"));
    match there {
        [] => "there are none".to_owned(),
        there => format!("there are: {}{near}", there.join(", ")),
    }
}

impl Choice {
    /// The name of the configuration among `configs` for a node with this label; `None` is the empty one.
    ///
    /// # Errors
    /// When the named configuration does not exist, or no name is given and no fallback applies.
    pub fn choose<T>(
        &self,
        label: Option<&str>,
        configs: &BTreeMap<String, T>,
    ) -> Result<Option<String>, ChoiceError> {
        let label = label.filter(|name| !name.is_empty()).map(|name| ("the node's label", name));
        let default = self.default.as_deref().filter(|name| !name.is_empty());
        if let Some((by, name)) = label.or(default.map(|name| ("the default", name))) {
            if configs.contains_key(name) {
                return Ok(Some(name.to_owned()));
            }
            return Err(ChoiceError::Absent {
                by,
                name: name.to_owned(),
                nearest: nearest(name, configs.keys().map(String::as_str)),
                there: configs.keys().cloned().collect(),
            });
        }
        for fallback in &self.fallbacks {
            match fallback {
                Fallback::Named if configs.contains_key("default") => return Ok(Some("default".to_owned())),
                Fallback::Single if configs.len() == 1 => return Ok(configs.keys().next().cloned()),
                Fallback::Empty => return Ok(None),
                Fallback::Named | Fallback::Single => {}
            }
        }
        Err(ChoiceError::None { there: configs.keys().cloned().collect() })
    }
}

/// The last known state of one object.
struct ObjectState<T> {
    state: State<T>,
    /// Whether the current list contained it.
    listed: bool,
}

/// The configurations by name, each with its text or its read error.
type Texts = BTreeMap<String, Result<String, String>>;

enum State<T> {
    Unknown,
    Absent,
    There(T),
}

impl<T> ObjectState<T> {
    const UNKNOWN: Self = Self { state: State::Unknown, listed: false };

    /// Applies an event of the object's watch; `value` extracts the relevant part.
    fn apply<K>(&mut self, event: Event<K>, value: impl Fn(&K) -> T) {
        match event {
            Event::Apply(object) => self.state = State::There(value(&object)),
            Event::Delete(_) => self.state = State::Absent,
            Event::Init => self.listed = false,
            Event::InitApply(object) => {
                self.listed = true;
                self.state = State::There(value(&object));
            }
            // An object that a new list does not contain was deleted while the watch was interrupted.
            Event::InitDone if !self.listed => self.state = State::Absent,
            Event::InitDone => {}
        }
    }

    fn is_unknown(&self) -> bool {
        matches!(self.state, State::Unknown)
    }
}

/// Sends this node's text whenever it changes, until `shutdown`.
pub(super) async fn follow(of: PerNode, sightings: mpsc::Sender<Sighting>, shutdown: CancellationToken) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = sightings.closed() => {}
        () = run(&of, &sightings) => {}
    }
}

async fn run(of: &PerNode, sightings: &mpsc::Sender<Sighting>) {
    let config =
        |name: &str| watcher::Config::default().fields(&format!("metadata.name={name}")).timeout(RENEW);
    let mut nodes = watcher(Api::<PartialObjectMeta<Node>>::all(of.client.clone()), config(of.node.as_str()))
        .default_backoff()
        .boxed();
    let mut maps: BoxStream<'_, watcher::Result<Event<ConfigMap>>> = match &of.configs {
        Configs::ConfigMap { namespace, name } => {
            let api = Api::<ConfigMap>::namespaced(of.client.clone(), namespace);
            watcher(api, config(name)).default_backoff().boxed()
        }
        Configs::Folder(_) => futures::stream::pending().boxed(),
    };
    let mut folder = match &of.configs {
        Configs::Folder(path) => Some(PathChanges::new(path.clone())),
        Configs::ConfigMap { .. } => None,
    };
    let mut seen = ConfigWatches::of(of);
    loop {
        if let Some(changes) = &mut folder {
            changes.arm();
        }
        let (news, wait) = seen.look();
        if let Some(sighting) = news
            && sightings.send(sighting).await.is_err()
        {
            return;
        }
        let moved = async {
            match &mut folder {
                Some(changes) => changes.next().await,
                None => pending().await,
            }
        };
        let noted = tokio::select! {
            () = moved => Ok(()),
            () = files::over(wait) => Ok(()),
            event = nodes.next() => match event {
                Some(event) => seen.node(event),
                None => return,
            },
            event = maps.next() => match event {
                Some(event) => seen.map(event),
                None => return,
            },
        };
        if let Err(reason) = noted
            && let Some(problem) = seen.failed(reason)
            && sightings.send(problem).await.is_err()
        {
            return;
        }
    }
}

/// The state of both watches, and the last sighting sent.
struct ConfigWatches<'o> {
    of: &'o PerNode,
    label: ObjectState<Option<String>>,
    configs: ObjectState<Texts>,
    last: Option<Sighting>,
    doubt: files::Doubt,
    failing: String,
}

impl<'o> ConfigWatches<'o> {
    fn of(of: &'o PerNode) -> Self {
        Self {
            of,
            label: ObjectState::UNKNOWN,
            configs: ObjectState::UNKNOWN,
            last: None,
            doubt: files::Doubt::default(),
            failing: String::new(),
        }
    }

    fn node(&mut self, event: watcher::Result<Event<PartialObjectMeta<Node>>>) -> Result<(), String> {
        let of = self.of;
        let event = event.map_err(|error| format!("the watch of node {} fails: {error}", of.node))?;
        let label = |node: &PartialObjectMeta<Node>| node.labels().get(&of.label).cloned();
        self.label.apply(event, label);
        Ok(())
    }

    fn map(&mut self, event: watcher::Result<Event<ConfigMap>>) -> Result<(), String> {
        let event = event.map_err(|error| format!("its watch fails: {error}"))?;
        self.configs.apply(event, |map: &ConfigMap| {
            let data = map.data.clone().unwrap_or_default();
            data.into_iter().map(|(key, text)| (key, Ok(text))).collect()
        });
        Ok(())
    }

    /// The sighting, if it differs from the last one; or how long to wait before it is accepted.
    fn look(&mut self) -> (Option<Sighting>, Option<Duration>) {
        let mut unreadable = None;
        if let Configs::Folder(path) = &self.of.configs {
            match files::list(path) {
                Ok(files) => self.configs.state = State::There(files),
                Err(error) => unreadable = Some(format!("cannot be read: {error}")),
            }
        }
        let sighting = match unreadable {
            Some(reason) => Some(problem(self.of, reason)),
            None => self.sighting(),
        };
        let Some(sighting) = sighting else {
            return (None, None);
        };
        // Only files are emptied before they are written: the API server sends whole ConfigMaps. At the start an empty file is accepted: the
        // choice may be to have none.
        if matches!(self.of.configs, Configs::Folder(_)) && self.last.is_some() {
            let wait = self.doubt.about(&sighting, self.last.as_ref(), Instant::now());
            if wait.is_some() {
                return (None, wait);
            }
        }
        // A node's metadata changes with every heartbeat; the configuration does not.
        if self.last.as_ref() == Some(&sighting) {
            return (None, None);
        }
        self.last = Some(sighting.clone());
        (Some(sighting), None)
    }

    /// The sighting for a failed watch.
    fn failed(&mut self, reason: String) -> Option<Sighting> {
        if reason != self.failing {
            warn!(source = name(self.of), reason, "configuration not followed for the moment");
            self.failing.clone_from(&reason);
        }
        // With a configuration in effect, an unreachable API server is no problem of the configuration.
        let unknown = self.label.is_unknown() || self.configs.is_unknown();
        unknown.then(|| problem(self.of, reason))
    }

    fn sighting(&self) -> Option<Sighting> {
        let of = self.of;
        let (label, configs) = match (&self.label.state, &self.configs.state) {
            (State::There(label), State::There(configs)) => (label, configs),
            (State::Absent, _) => return Some(problem(of, format!("there is no node {}", of.node))),
            (_, State::Absent) => return Some(problem(of, "there is no such ConfigMap".to_owned())),
            (State::Unknown, _) | (_, State::Unknown) => return None,
        };
        let chosen = of.choice.choose(label.as_deref(), configs);
        Some(match chosen {
            Ok(Some(key)) => {
                let text = configs.get(&key).cloned().unwrap_or(Ok(String::new()));
                Sighting {
                    source: match (&of.configs, &text) {
                        (Configs::Folder(folder), Err(_)) => folder.join(&key).display().to_string(),
                        _ => format!("{}, {key}", name(of)),
                    },
                    text: text.map_err(|reason| format!("cannot be read: {reason}")),
                }
            }
            Ok(None) => Sighting { source: format!("{}, none chosen", name(of)), text: Ok(String::new()) },
            Err(error) => problem(of, format!("{error} (label {})", of.label)),
        })
    }
}

fn problem(of: &PerNode, reason: String) -> Sighting {
    Sighting { source: name(of), text: Err(reason) }
}

fn name(of: &PerNode) -> String {
    match &of.configs {
        Configs::Folder(path) => path.display().to_string(),
        Configs::ConfigMap { namespace, name } => format!("ConfigMap {namespace}/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configs(names: &[&str]) -> BTreeMap<String, String> {
        names.iter().map(|name| ((*name).to_owned(), String::new())).collect()
    }

    #[test]
    fn choice_order_is_label_default_fallbacks() {
        use Fallback::{Empty, Named, Single};
        type Case =
            (Option<&'static str>, Option<&'static str>, &'static [Fallback], &'static [&'static str]);
        let absent = |by, name: &str, nearest: Option<&str>, there: &[&str]| ChoiceError::Absent {
            by,
            name: name.to_owned(),
            nearest: nearest.map(str::to_owned),
            there: there.iter().map(|name| (*name).to_owned()).collect(),
        };
        let none = |there: &[&str]| ChoiceError::None {
            there: there.iter().map(|name| (*name).to_owned()).collect(),
        };
        let cases: [(Case, Result<Option<&str>, ChoiceError>); 13] = [
            ((Some("a"), Some("b"), &[Named], &["a", "b", "default"]), Ok(Some("a"))),
            ((None, Some("b"), &[Named], &["a", "b", "default"]), Ok(Some("b"))),
            ((Some(""), Some("b"), &[], &["a", "b"]), Ok(Some("b"))),
            ((None, None, &[Named, Single], &["a", "default"]), Ok(Some("default"))),
            ((None, None, &[Named, Single], &["a"]), Ok(Some("a"))),
            ((None, None, &[Named, Single, Empty], &["a", "b"]), Ok(None)),
            ((None, None, &[Empty, Named], &["default"]), Ok(None)),
            ((None, Some(""), &[Empty], &[]), Ok(None)),
            ((None, None, &[Named, Single], &["a", "b"]), Err(none(&["a", "b"]))),
            ((None, None, &[], &["a"]), Err(none(&["a"]))),
            (
                (Some("x1"), Some("b"), &[Empty], &["a100", "b"]),
                Err(absent("the node's label", "x1", None, &["a100", "b"])),
            ),
            (
                (Some("a10"), None, &[], &["a100", "b"]),
                Err(absent("the node's label", "a10", Some("a100"), &["a100", "b"])),
            ),
            ((None, Some("gone"), &[Empty], &[]), Err(absent("the default", "gone", None, &[]))),
        ];
        let mut errors = Vec::new();
        for ((label, default, fallbacks, names), expected) in cases {
            let choice = Choice { default: default.map(str::to_owned), fallbacks: fallbacks.to_vec() };
            let chosen = choice.choose(label, &configs(names));
            let expected = expected.map(|name| name.map(str::to_owned));
            assert_eq!(chosen, expected, "{label:?} {choice:?} {names:?}");
            errors.extend(chosen.err().map(|error| error.to_string()));
        }
        insta::assert_snapshot!(errors.join("\n"), @r#"
        nothing names a configuration and no fallback finds one; there are: a, b
        nothing names a configuration and no fallback finds one; there are: a
        the node's label names the configuration "x1", which is not there; there are: a100, b
        the node's label names the configuration "a10", which is not there; there are: a100, b; did you mean "a100"?
        the default names the configuration "gone", which is not there; there are none
        "#);
    }
}
