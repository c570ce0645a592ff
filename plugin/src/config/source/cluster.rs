//! Chooses one of several configurations by a label of the node. Two watches, of one Node's metadata and of one ConfigMap (or a
//! folder instead): nothing else of the cluster is read.

use std::collections::BTreeMap;
use std::future::pending;
use std::time::Instant;

use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::files::{self, Changes};
use super::{Configs, PerNode, Sighting};

/// Seconds after which a watch is renewed, well before silence is taken for a dead connection.
const RENEW: u32 = 30;

/// What is known of one object.
struct Known<T> {
    state: State<T>,
    /// Whether the list that is being read has named it.
    listed: bool,
}

/// The configurations by name, each with its text or what keeps it from being read.
type Texts = BTreeMap<String, Result<String, String>>;

enum State<T> {
    Unasked,
    Absent,
    There(T),
}

impl<T> Known<T> {
    const UNASKED: Self = Self {
        state: State::Unasked,
        listed: false,
    };

    /// Takes an event of the object's watch; `value` is what counts of it.
    fn note<K>(&mut self, event: Event<K>, value: impl Fn(&K) -> T) {
        match event {
            Event::Apply(object) => self.state = State::There(value(&object)),
            Event::Delete(_) => self.state = State::Absent,
            Event::Init => self.listed = false,
            Event::InitApply(object) => {
                self.listed = true;
                self.state = State::There(value(&object));
            }
            // What a new list does not name went while nobody watched.
            Event::InitDone if !self.listed => self.state = State::Absent,
            Event::InitDone => {}
        }
    }

    fn is_unasked(&self) -> bool {
        matches!(self.state, State::Unasked)
    }
}

/// Tells which text is this node's whenever that changes, until `shutdown`.
pub(super) async fn follow(of: PerNode, sightings: mpsc::Sender<Sighting>, shutdown: CancellationToken) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = sightings.closed() => {}
        () = run(&of, &sightings) => {}
    }
}

async fn run(of: &PerNode, sightings: &mpsc::Sender<Sighting>) {
    let config = |name: &str| {
        watcher::Config::default()
            .fields(&format!("metadata.name={name}"))
            .timeout(RENEW)
    };
    let mut nodes = watcher(
        Api::<PartialObjectMeta<Node>>::all(of.client.clone()),
        config(of.node.as_str()),
    )
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
        Configs::Folder(path) => Some((path, Changes::new(path.clone()))),
        Configs::ConfigMap { .. } => None,
    };
    let mut label: Known<Option<String>> = Known::UNASKED;
    let mut configs: Known<Texts> = Known::UNASKED;
    let mut failing = String::new();
    let mut last = None;
    let mut doubt = files::Doubt::default();
    loop {
        let mut unreadable = None;
        if let Some((path, changes)) = &mut folder {
            changes.arm();
            match files::list(path) {
                Ok(files) => configs.state = State::There(files),
                Err(error) => unreadable = Some(format!("cannot be read: {error}")),
            }
        }
        let sighting = match unreadable {
            Some(reason) => Some(problem(of, reason)),
            None => sighting(of, &label, &configs),
        };
        let wait = match (&sighting, &folder) {
            // Nor is a file of the folder doubted at the start: the choice may be to have none.
            (Some(sighting), Some(_)) if last.is_some() => {
                doubt.about(sighting, last.as_ref(), Instant::now())
            }
            // The API server tells of whole ConfigMaps only.
            _ => None,
        };
        // A node's metadata changes with every heartbeat; the configuration does not.
        if wait.is_none() && sighting.is_some() && sighting != last {
            last.clone_from(&sighting);
            if let Some(sighting) = sighting
                && sightings.send(sighting).await.is_err()
            {
                return;
            }
        }
        let moved = async {
            match &mut folder {
                Some((_, changes)) => changes.next().await,
                None => pending().await,
            }
        };
        let failed = tokio::select! {
            () = moved => None,
            () = files::over(wait) => None,
            event = nodes.next() => match event {
                Some(Ok(event)) => {
                    let text = |node: &PartialObjectMeta<Node>| node.labels().get(&of.label).cloned();
                    label.note(event, text);
                    None
                }
                Some(Err(error)) => Some(format!("the watch of node {} fails: {error}", of.node)),
                None => return,
            },
            event = maps.next() => match event {
                Some(Ok(event)) => {
                    configs.note(event, |map: &ConfigMap| {
                        let data = map.data.clone().unwrap_or_default();
                        data.into_iter().map(|(key, text)| (key, Ok(text))).collect()
                    });
                    None
                }
                Some(Err(error)) => Some(format!("its watch fails: {error}")),
                None => return,
            },
        };
        if let Some(reason) = failed {
            if reason != failing {
                warn!(
                    source = name(of),
                    reason, "configuration not followed for the moment"
                );
                failing.clone_from(&reason);
            }
            // With a configuration in effect, an API server that is away for a while is nobody's mistake.
            if (label.is_unasked() || configs.is_unasked())
                && sightings.send(problem(of, reason)).await.is_err()
            {
                return;
            }
        }
    }
}

fn sighting(of: &PerNode, label: &Known<Option<String>>, configs: &Known<Texts>) -> Option<Sighting> {
    let (label, configs) = match (&label.state, &configs.state) {
        (State::There(label), State::There(configs)) => (label, configs),
        (State::Absent, _) => return Some(problem(of, format!("there is no node {}", of.node))),
        (_, State::Absent) => return Some(problem(of, "there is no such ConfigMap".to_owned())),
        (State::Unasked, _) | (_, State::Unasked) => return None,
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
        Ok(None) => Sighting {
            source: format!("{}, none chosen", name(of)),
            text: Ok(String::new()),
        },
        Err(error) => problem(of, format!("{error} (label {})", of.label)),
    })
}

fn problem(of: &PerNode, reason: String) -> Sighting {
    Sighting {
        source: name(of),
        text: Err(reason),
    }
}

fn name(of: &PerNode) -> String {
    match &of.configs {
        Configs::Folder(path) => path.display().to_string(),
        Configs::ConfigMap { namespace, name } => format!("ConfigMap {namespace}/{name}"),
    }
}
