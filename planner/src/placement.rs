//! What a pod asks of its devices other than their number: the least link and bandwidth between them, their model, and
//! which of the nodes that have them. Read from annotations and from the operator's defaults.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use gantry_api::names;
use gantry_gang::integrations::{not_one_of, shown};
use gantry_topology::LinkClass;
use gantry_topology::bandwidth::known_model;

use crate::decide::Policy;

/// The most GB/s that can be asked: above any link.
const MAX_GBS: u32 = 10_000;
/// The most models in one list.
const MAX_MODELS: usize = 16;
/// The longest name of a model.
const MAX_MODEL: usize = 64;

/// What each container's set of devices must be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct SetTerms {
    /// The least class of what carries a collective over two devices or more.
    pub link: Option<LinkClass>,
    /// The least bandwidth of such a collective, in GB/s.
    pub gbs: Option<u32>,
    /// The models of which the GPUs are one, the best first; any if empty.
    pub models: Arc<[Arc<str>]>,
}

impl SetTerms {
    /// Whether anything is asked of the links.
    pub fn are_of_links(&self) -> bool {
        self.link.is_some() || self.gbs.is_some()
    }

    /// Whether anything is asked.
    pub fn is_empty(&self) -> bool {
        !self.are_of_links() && self.models.is_empty()
    }

    /// Whether a set with links of this class and bandwidth meets the terms.
    pub fn are_met(&self, class: LinkClass, gbs: f64) -> bool {
        self.link.is_none_or(|least| class >= least) && self.gbs.is_none_or(|least| gbs >= f64::from(least))
    }
}

/// What a pod asks of its devices other than their number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct PlacementRequest {
    /// What must be.
    pub required: SetTerms,
    /// The link and bandwidth that are taken where they are free.
    pub preferred: SetTerms,
    /// Whether the cheapest nodes that meet it are taken, not the fastest.
    pub economy: bool,
    /// Which of equally good nodes to take, if not as the operator configured.
    pub policy: Option<Policy>,
}

/// An annotation or default that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct PlacementError {
    /// The annotation, or the operator's default.
    place: String,
    /// The value, what is allowed, and the nearest allowed value.
    problem: String,
}

/// The annotations that a pod may set, with their forms.
const ANNOTATIONS: [&str; 7] = [
    names::REQUIRED_LINK_ANNOTATION,
    names::PREFERRED_LINK_ANNOTATION,
    names::REQUIRED_BANDWIDTH_ANNOTATION,
    names::PREFERRED_BANDWIDTH_ANNOTATION,
    names::ECONOMY_ANNOTATION,
    names::GPU_MODELS_ANNOTATION,
    names::NODE_POLICY_ANNOTATION,
];

/// Whether an annotation is one of these.
pub fn reads(annotation: &str) -> bool {
    ANNOTATIONS.contains(&annotation)
}

/// The request annotations of a pod as written, by name, long values cut.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct WrittenRequest(Vec<(&'static str, Arc<str>)>);

/// Longest value that is kept, in characters.
const MAX_WRITTEN: usize = 1200;

impl WrittenRequest {
    /// The request annotations among some annotations.
    pub fn of<'a>(annotations: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let mut written: Vec<(&'static str, Arc<str>)> = annotations
            .filter_map(|(name, text)| {
                let name = ANNOTATIONS.iter().find(|known| **known == name)?;
                let end = text.char_indices().nth(MAX_WRITTEN).map_or(text.len(), |(end, _)| end);
                Some((*name, text.get(..end)?.into()))
            })
            .collect();
        written.sort_unstable();
        Self(written)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// About how many bytes it takes.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|(_, text)| 48 + text.len()).sum()
    }

    /// Why the first annotation has no effect on a pod that requests no devices; `None` without any.
    pub fn without_devices(&self) -> Option<String> {
        let (name, text) = self.0.first()?;
        let why =
            format!("the pod requests no devices of Gantry: request {} or remove it", names::GPU_RESOURCE);
        Some(without_effect(name, text, &why))
    }

    /// Why an annotation has no effect on a member of a gang.
    pub fn of_gang_member(&self) -> Option<String> {
        let (name, text) = self.0.iter().find(|(name, _)| *name == names::NODE_POLICY_ANNOTATION)?;
        let why = "the pod is a member of a gang, and gangs are packed: remove it, and keep members apart by \
                   topologySpreadConstraints";
        Some(without_effect(name, text, why))
    }

    /// Why the first annotation that differs from those before has no effect on a pod that is bound.
    pub fn changed_while_bound(&self, before: &Self) -> Option<String> {
        let why = "the pod is bound and keeps its devices: create the pod again to apply it";
        if let Some((name, text)) = self.0.iter().find(|written| !before.0.contains(written)) {
            return Some(without_effect(name, text, why));
        }
        let is_removed = |name: &str| self.0.iter().all(|(known, _)| *known != name);
        let (name, _) = before.0.iter().find(|(name, _)| is_removed(name))?;
        Some(format!("the removal of annotation {name} has no effect, because {why}"))
    }
}

/// That an annotation has no effect, and what is allowed if its value is not.
fn without_effect(name: &str, text: &str, why: &str) -> String {
    let problem = StatedPreferences::default()
        .take(name, text)
        .err()
        .map_or_else(String::new, |problem| format!("; {problem}"));
    format!("annotation {name} ({}) has no effect, because {why}{problem}", shown(text))
}

impl PlacementRequest {
    /// Reads the annotations of a pod; other annotations are ignored. What they leave open is taken from `defaults`.
    ///
    /// # Errors
    /// The first value that is not allowed, or contradicts another.
    pub fn read<'a>(
        annotations: impl Iterator<Item = (&'a str, &'a str)>,
        defaults: &Self,
    ) -> Result<Self, PlacementError> {
        let mut own = StatedPreferences::default();
        for (name, text) in annotations {
            own.take(name, text)
                .map_err(|problem| PlacementError { place: format!("annotation {name}"), problem })?;
        }
        own.check("")?;
        Ok(own.over(defaults))
    }

    /// Whether nothing is asked.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether some devices that meet it are preferred to others: by their model, link, bandwidth or the cost of their node.
    pub fn has_preferences(&self) -> bool {
        self.economy || self.preferred.are_of_links() || self.required.models.len() > 1
    }
}

/// What one pod's annotations, or one set of defaults, state.
#[derive(Debug, Default)]
struct StatedPreferences {
    /// Required and preferred.
    link: [Option<LinkClass>; 2],
    gbs: [Option<u32>; 2],
    models: Option<Arc<[Arc<str>]>>,
    economy: Option<bool>,
    policy: Option<Policy>,
}

impl StatedPreferences {
    fn take(&mut self, name: &str, text: &str) -> Result<(), String> {
        match name {
            names::REQUIRED_LINK_ANNOTATION => self.link[0] = Some(link(text)?),
            names::PREFERRED_LINK_ANNOTATION => self.link[1] = Some(link(text)?),
            names::REQUIRED_BANDWIDTH_ANNOTATION => self.gbs[0] = Some(bandwidth(text)?),
            names::PREFERRED_BANDWIDTH_ANNOTATION => self.gbs[1] = Some(bandwidth(text)?),
            names::GPU_MODELS_ANNOTATION => self.models = Some(models(text)?),
            names::ECONOMY_ANNOTATION => {
                self.economy = Some(one_of(text, [("true", true), ("false", false)])?);
            }
            names::NODE_POLICY_ANNOTATION => {
                self.policy = Some(one_of(text, [("pack", Policy::Pack), ("spread", Policy::Spread)])?);
            }
            _ => {}
        }
        Ok(())
    }

    /// A preference below the requirement has no effect, so it is a mistake.
    fn check(&self, scope: &str) -> Result<(), PlacementError> {
        let contradiction = |preferred: &str,
                             value: &dyn fmt::Display,
                             required: &str,
                             least: &dyn fmt::Display| {
            Err(PlacementError {
                place: format!("{scope}annotation {preferred}"),
                problem: format!(
                    "{value} has no effect, because {required} is {least}; prefer more than is required, or remove it"
                ),
            })
        };
        if let [Some(least), Some(wanted)] = self.link
            && wanted <= least
        {
            let names = [names::PREFERRED_LINK_ANNOTATION, names::REQUIRED_LINK_ANNOTATION];
            return contradiction(names[0], &wanted, names[1], &least);
        }
        if let [Some(least), Some(wanted)] = self.gbs
            && wanted <= least
        {
            let names = [names::PREFERRED_BANDWIDTH_ANNOTATION, names::REQUIRED_BANDWIDTH_ANNOTATION];
            return contradiction(names[0], &wanted, names[1], &least);
        }
        Ok(())
    }

    fn over(self, defaults: &PlacementRequest) -> PlacementRequest {
        let link = |class: Option<LinkClass>| class.filter(|class| *class > LinkClass::Any);
        PlacementRequest {
            required: SetTerms {
                link: self.link[0].map_or(defaults.required.link, |class| link(Some(class))),
                gbs: self.gbs[0].or(defaults.required.gbs),
                models: self.models.unwrap_or_else(|| Arc::clone(&defaults.required.models)),
            },
            preferred: SetTerms {
                link: self.link[1].map_or(defaults.preferred.link, |class| link(Some(class))),
                gbs: self.gbs[1].or(defaults.preferred.gbs),
                models: Arc::default(),
            },
            economy: self.economy.unwrap_or(defaults.economy),
            policy: self.policy.or(defaults.policy),
        }
    }
}

fn one_of<T, const N: usize>(text: &str, words: [(&str, T); N]) -> Result<T, String> {
    let allowed = words.each_ref().map(|(word, _)| *word);
    let found = words.into_iter().find(|(word, _)| *word == text);
    found.map(|(_, value)| value).ok_or_else(|| not_one_of(text, &allowed))
}

fn link(text: &str) -> Result<LinkClass, String> {
    one_of(text, LinkClass::ALL.map(|class| (class.as_str(), class)))
}

fn bandwidth(text: &str) -> Result<u32, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = is_number.then(|| text.parse::<u32>().ok()).flatten();
    number.filter(|gbs| (1..=MAX_GBS).contains(gbs)).ok_or_else(|| {
        let nearest =
            nearest_bandwidth(text).map_or_else(String::new, |gbs| format!("; did you mean `{gbs}`?"));
        format!("{} is no bandwidth: write whole GB/s, 1 to {MAX_GBS}{nearest}", shown(text))
    })
}

/// The bandwidth that a text with a unit, a fraction or a number out of range comes nearest to.
fn nearest_bandwidth(text: &str) -> Option<u32> {
    let text = text.trim();
    let end = text.find(|ch: char| !ch.is_ascii_digit() && ch != '.').unwrap_or(text.len());
    let number: f64 = text.get(..end)?.parse().ok()?;
    // A cast from a float stays within the type.
    Some((number.round() as u32).clamp(1, MAX_GBS))
}

fn models(text: &str) -> Result<Arc<[Arc<str>]>, String> {
    let mut models: Vec<Arc<str>> = Vec::new();
    for word in text.split(',') {
        let model = word.trim();
        if model.len() > MAX_MODEL || words(model).is_empty() {
            return Err(format!(
                "{} has an entry that is no GPU model; write names with commas, such as H100, A100",
                shown(text)
            ));
        }
        if let Err(Some(nearest)) = known_model(model) {
            return Err(format!("{} is no known GPU model; did you mean `{nearest}`?", shown(model)));
        }
        if models.iter().any(|known| words(known) == words(model)) {
            return Err(format!("{} is named twice; name each model once", shown(model)));
        }
        models.push(model.into());
    }
    if models.len() > MAX_MODELS {
        return Err(format!("{} models are named, at most {MAX_MODELS} are allowed", models.len()));
    }
    Ok(models.into())
}

/// Checks an order of GPU models by their cost, as an operator lists them.
///
/// # Errors
/// The first entry that is no known model, is empty or is named twice; too many entries.
pub fn check_cost_order(listed: &[String]) -> Result<(), String> {
    if listed.is_empty() { Ok(()) } else { models(&listed.join(",")).map(drop) }
}

/// Whether a GPU's full name, such as `NVIDIA A100-SXM4-80GB`, is of a model such as `A100`: it has all of its words.
pub fn is_of_model(name: &str, model: &str) -> bool {
    let name = words(name);
    words(model).iter().all(|word| name.contains(word))
}

fn words(text: &str) -> Vec<String> {
    let upper = text.to_ascii_uppercase();
    let words = upper.split(|ch: char| !ch.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_owned).collect()
}

/// The operator's defaults: for the cluster, and for namespaces over those.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementDefaults {
    cluster: PlacementRequest,
    namespaces: BTreeMap<String, PlacementRequest>,
}

impl PlacementDefaults {
    /// Reads items of the form `NAME=VALUE` or `NAMESPACE/NAME=VALUE`, where `gantry.dev/NAME` is an annotation.
    ///
    /// # Errors
    /// The first item that cannot be used.
    pub fn read<'a>(items: impl IntoIterator<Item = &'a str>) -> Result<Self, PlacementError> {
        let mut by_namespace: BTreeMap<&str, StatedPreferences> = BTreeMap::new();
        for item in items {
            let fault = |problem| PlacementError { place: format!("default {}", shown(item)), problem };
            let form = || fault("must have the form [NAMESPACE/]NAME=VALUE".to_owned());
            let (key, value) = item.split_once('=').ok_or_else(form)?;
            let (namespace, short) = key.rsplit_once('/').unwrap_or(("", key));
            if !namespace.is_empty() && !names::is_label(namespace) {
                return Err(fault(format!("{} cannot be the name of a namespace", shown(namespace))));
            }
            let known = ANNOTATIONS.iter().filter_map(|name| name.strip_prefix("gantry.dev/"));
            let known: Vec<&str> = known.collect();
            let place = known.iter().position(|known| *known == short);
            let name = place.and_then(|place| ANNOTATIONS.get(place));
            let name = name.ok_or_else(|| fault(not_one_of(short, &known)))?;
            by_namespace.entry(namespace).or_default().take(name, value).map_err(fault)?;
        }
        let of_cluster = by_namespace.remove("").unwrap_or_default();
        of_cluster.check("defaults of the cluster: ")?;
        for (namespace, own) in &by_namespace {
            // What a namespace leaves open is the cluster's.
            let link = [0, 1].map(|at: usize| own.link[at].or(of_cluster.link[at]));
            let gbs = [0, 1].map(|at: usize| own.gbs[at].or(of_cluster.gbs[at]));
            StatedPreferences { link, gbs, ..StatedPreferences::default() }
                .check(&format!("defaults of namespace {namespace}: "))?;
        }
        let cluster = of_cluster.over(&PlacementRequest::default());
        let namespaces = by_namespace.into_iter();
        let namespaces = namespaces.map(|(name, own)| (name.to_owned(), own.over(&cluster))).collect();
        Ok(Self { cluster, namespaces })
    }

    /// The defaults of a namespace.
    pub fn of(&self, namespace: &str) -> &PlacementRequest {
        self.namespaces.get(namespace).unwrap_or(&self.cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(annotations: &[(&str, &str)]) -> Result<PlacementRequest, String> {
        read_over(annotations, &PlacementRequest::default())
    }

    fn read_over(annotations: &[(&str, &str)], over: &PlacementRequest) -> Result<PlacementRequest, String> {
        let named: Vec<(String, &str)> =
            annotations.iter().map(|(name, text)| (format!("gantry.dev/{name}"), *text)).collect();
        let named = named.iter().map(|(name, text)| (name.as_str(), *text));
        PlacementRequest::read(named, over).map_err(|error| error.to_string())
    }

    #[test]
    fn annotations_are_read() {
        let request = read(&[
            ("required-link", "pcie-switch"),
            ("preferred-link", "nvlink"),
            ("required-bandwidth", "40"),
            ("economy", "true"),
            ("gpu-models", "H100, A100"),
            ("node-policy", "spread"),
            ("gang", "a"),
        ])
        .unwrap();
        assert_eq!(request.required.link, Some(LinkClass::PcieSwitch));
        assert_eq!(request.required.gbs, Some(40));
        assert_eq!(request.required.models.len(), 2);
        assert_eq!(request.preferred.link, Some(LinkClass::NvLink));
        assert!(request.economy && request.policy == Some(Policy::Spread));
        assert!(read(&[("required-link", "any")]).unwrap().is_empty());
    }

    #[test]
    fn bad_values_name_what_is_allowed() {
        let refused = |name, text| read(&[(name, text)]).unwrap_err();
        insta::assert_snapshot!(refused("required-link", "nvlnk"), @r#"annotation gantry.dev/required-link: "nvlnk" is none of nvlink, pcie-switch, numa, any; did you mean `nvlink`?"#);
        insta::assert_snapshot!(refused("required-bandwidth", "40GB"), @r#"annotation gantry.dev/required-bandwidth: "40GB" is no bandwidth: write whole GB/s, 1 to 10000; did you mean `40`?"#);
        insta::assert_snapshot!(refused("required-bandwidth", "fast"), @r#"annotation gantry.dev/required-bandwidth: "fast" is no bandwidth: write whole GB/s, 1 to 10000"#);
        insta::assert_snapshot!(refused("required-bandwidth", "99.6 GB/s"), @r#"annotation gantry.dev/required-bandwidth: "99.6 GB/s" is no bandwidth: write whole GB/s, 1 to 10000; did you mean `100`?"#);
        insta::assert_snapshot!(refused("preferred-bandwidth", "0"), @r#"annotation gantry.dev/preferred-bandwidth: "0" is no bandwidth: write whole GB/s, 1 to 10000; did you mean `1`?"#);
        insta::assert_snapshot!(refused("economy", "yes"), @r#"annotation gantry.dev/economy: "yes" is none of true, false"#);
        insta::assert_snapshot!(refused("gpu-models", "H10O"), @r#"annotation gantry.dev/gpu-models: "H10O" is no known GPU model; did you mean `H100`?"#);
        insta::assert_snapshot!(refused("gpu-models", "A100, a100"), @r#"annotation gantry.dev/gpu-models: "a100" is named twice; name each model once"#);
        insta::assert_snapshot!(refused("gpu-models", "A100,,"), @r#"annotation gantry.dev/gpu-models: "A100,," has an entry that is no GPU model; write names with commas, such as H100, A100"#);
        insta::assert_snapshot!(refused("node-policy", "packd"), @r#"annotation gantry.dev/node-policy: "packd" is none of pack, spread; did you mean `pack`?"#);
    }

    #[test]
    fn annotations_without_effect_have_a_reason() {
        let written = |all: &[(&str, &str)]| WrittenRequest::of(all.iter().copied());
        let none = written(&[("example.com/a", "b")]);
        assert!(none.is_empty() && none.without_devices().is_none());
        let nvlink = written(&[("gantry.dev/required-link", "nvlink"), ("example.com/a", "b")]);
        insta::assert_snapshot!(nvlink.without_devices().unwrap(), @r#"annotation gantry.dev/required-link ("nvlink") has no effect, because the pod requests no devices of Gantry: request nvidia.com/gpu or remove it"#);
        let wrong = written(&[("gantry.dev/required-link", "nvlnk")]);
        insta::assert_snapshot!(wrong.without_devices().unwrap(), @r#"annotation gantry.dev/required-link ("nvlnk") has no effect, because the pod requests no devices of Gantry: request nvidia.com/gpu or remove it; "nvlnk" is none of nvlink, pcie-switch, numa, any; did you mean `nvlink`?"#);
        insta::assert_snapshot!(wrong.changed_while_bound(&nvlink).unwrap(), @r#"annotation gantry.dev/required-link ("nvlnk") has no effect, because the pod is bound and keeps its devices: create the pod again to apply it; "nvlnk" is none of nvlink, pcie-switch, numa, any; did you mean `nvlink`?"#);
        insta::assert_snapshot!(nvlink.changed_while_bound(&none).unwrap(), @r#"annotation gantry.dev/required-link ("nvlink") has no effect, because the pod is bound and keeps its devices: create the pod again to apply it"#);
        insta::assert_snapshot!(none.changed_while_bound(&nvlink).unwrap(), @"the removal of annotation gantry.dev/required-link has no effect, because the pod is bound and keeps its devices: create the pod again to apply it");
        assert_eq!(nvlink.changed_while_bound(&nvlink), None);
        assert_eq!(nvlink.of_gang_member(), None);
        let spread = written(&[("gantry.dev/node-policy", "spread")]);
        insta::assert_snapshot!(spread.of_gang_member().unwrap(), @r#"annotation gantry.dev/node-policy ("spread") has no effect, because the pod is a member of a gang, and gangs are packed: remove it, and keep members apart by topologySpreadConstraints"#);
        let long = "A100,".repeat(100_000);
        assert!(written(&[("gantry.dev/gpu-models", &long)]).without_devices().unwrap().len() < 400);
    }

    #[test]
    fn preference_below_requirement_is_a_contradiction() {
        let links = read(&[("required-link", "nvlink"), ("preferred-link", "numa")]).unwrap_err();
        insta::assert_snapshot!(links, @"annotation gantry.dev/preferred-link: numa has no effect, because gantry.dev/required-link is nvlink; prefer more than is required, or remove it");
        let rates = read(&[("required-bandwidth", "40"), ("preferred-bandwidth", "40")]).unwrap_err();
        insta::assert_snapshot!(rates, @"annotation gantry.dev/preferred-bandwidth: 40 has no effect, because gantry.dev/required-bandwidth is 40; prefer more than is required, or remove it");
    }

    #[test]
    fn models_match_by_whole_words() {
        assert!(is_of_model("NVIDIA A100-SXM4-80GB", "A100"));
        assert!(is_of_model("NVIDIA A100-SXM4-80GB", "NVIDIA-A100-SXM4-80GB"));
        assert!(is_of_model("NVIDIA L40S", "l40s"));
        assert!(!is_of_model("NVIDIA L40S", "L4"));
        assert!(!is_of_model("NVIDIA L4", "L40"));
    }

    #[test]
    fn defaults_of_namespace_precede_those_of_cluster() {
        let items = ["preferred-link=nvlink", "team-a/economy=true", "team-a/required-bandwidth=20"];
        let defaults = PlacementDefaults::read(items).unwrap();
        assert_eq!(defaults.of("team-b").preferred.link, Some(LinkClass::NvLink));
        assert!(!defaults.of("team-b").economy);
        let team_a = defaults.of("team-a");
        assert_eq!((team_a.preferred.link, team_a.economy), (Some(LinkClass::NvLink), true));
        let own = read_over(&[("economy", "false"), ("preferred-link", "any")], team_a).unwrap();
        assert_eq!((own.preferred.link, own.economy, own.required.gbs), (None, false, Some(20)));
    }

    #[test]
    fn namespace_default_below_the_clusters_is_refused() {
        let refused = |items: [&str; 2]| PlacementDefaults::read(items).unwrap_err().to_string();
        insta::assert_snapshot!(refused(["required-link=nvlink", "team-a/preferred-link=numa"]), @"defaults of namespace team-a: annotation gantry.dev/preferred-link: numa has no effect, because gantry.dev/required-link is nvlink; prefer more than is required, or remove it");
        insta::assert_snapshot!(refused(["preferred-bandwidth=40", "team-a/required-bandwidth=50"]), @"defaults of namespace team-a: annotation gantry.dev/preferred-bandwidth: 40 has no effect, because gantry.dev/required-bandwidth is 50; prefer more than is required, or remove it");
        assert!(PlacementDefaults::read(["required-link=numa", "team-a/preferred-link=nvlink"]).is_ok());
    }

    #[test]
    fn bad_cost_order_is_refused() {
        let refused = |listed: &[&str]| {
            let listed: Vec<String> = listed.iter().map(ToString::to_string).collect();
            check_cost_order(&listed).unwrap_err()
        };
        insta::assert_snapshot!(refused(&["H10O", "A100"]), @r#""H10O" is no known GPU model; did you mean `H100`?"#);
        insta::assert_snapshot!(refused(&["A100", "", "H100"]), @r#""A100,,H100" has an entry that is no GPU model; write names with commas, such as H100, A100"#);
        insta::assert_snapshot!(refused(&["A100", "a100"]), @r#""a100" is named twice; name each model once"#);
        assert!(check_cost_order(&[]).is_ok());
    }

    #[test]
    fn bad_defaults_are_refused() {
        let refused = |item| PlacementDefaults::read([item]).unwrap_err().to_string();
        insta::assert_snapshot!(refused("economy"), @r#"default "economy": must have the form [NAMESPACE/]NAME=VALUE"#);
        insta::assert_snapshot!(refused("economi=true"), @r#"default "economi=true": "economi" is none of required-link, preferred-link, required-bandwidth, preferred-bandwidth, economy, gpu-models, node-policy; did you mean `economy`?"#);
        insta::assert_snapshot!(refused("Team/economy=true"), @r#"default "Team/economy=true": "Team" cannot be the name of a namespace"#);
        insta::assert_snapshot!(refused("required-link=fast"), @r#"default "required-link=fast": "fast" is none of nvlink, pcie-switch, numa, any"#);
    }
}
