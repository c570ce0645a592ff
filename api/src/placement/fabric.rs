//! Why a gang has its part of the fabric: at each level the domains that were compared, and why the best of the others
//! lost. Kept in the status of the Gang, in bounded size.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// The comparison by which a gang was placed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ComparedFabric {
    /// Reservations that were planned together, spare ones included.
    pub members: u32,
    /// Which devices counted as free: `Free`, `OnRails` or `AfterPreemption`.
    #[serde(default, skip_serializing_if = "CountedDevices::is_free")]
    #[schemars(with = "String")]
    pub counted: CountedDevices,
    /// The levels, from the node up to the one of which a single domain holds the gang.
    pub levels: Vec<ComparedLevel>,
}

/// Devices that count as free in a comparison.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CountedDevices {
    /// Those that were free.
    #[default]
    Free,
    /// Of those the ones on the rails that the gang uses.
    OnRails,
    /// In addition those of the pods and reservations that the gang displaces.
    AfterPreemption,
}

/// The domains of one level.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ComparedLevel {
    /// The level: `node`, a name of the configuration, or `cluster`.
    pub level: String,
    /// How many domains were compared.
    pub domains: u32,
    /// How many of them hold all members.
    pub holding: u32,
    /// How many the gang uses.
    pub used: u32,
    /// The domain that holds the gang. Absent if the gang uses several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<String>,
    /// The best of the others, or of all if none was chosen: three at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<ComparedDomain>,
}

/// A domain that lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ComparedDomain {
    /// The domain, such as `rack r7` or the name of a node.
    pub domain: String,
    /// The first difference, in the order in which domains are compared, such as `Members` or `LeftOver`.
    #[schemars(with = "String")]
    pub reason: DomainLoss,
    /// What the reason compares, of this domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<i64>,
    /// The same of the chosen domain, or what is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen_value: Option<i64>,
    /// Of the reason `Parts`: the level that is counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
}

/// Why a domain was not chosen, in the order in which domains are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DomainLoss {
    /// Fewer members fit than must be placed together.
    Members,
    /// Members of each shape fit by themselves; the free devices do not suffice for all.
    Devices,
    /// Members fit by number; a rule among them, or the mix of shapes, leaves no packing that was found.
    Rules,
    /// Its GPUs are of a model that the pods list later.
    Model,
    /// It costs more, and the pods ask for economy.
    Cost,
    /// Lower bandwidth of the slowest member within its node, MB/s.
    Bandwidth,
    /// As fast within the nodes, over a farther link.
    Link,
    /// The gang would be in more domains of a lower level.
    Parts,
    /// It has room for more members beyond the gang.
    LeftOver,
    /// It has more free devices.
    FreeDevices,
    /// The gang would be on more nodes.
    Nodes,
    /// The largest share of one node would be larger.
    Uneven,
    /// It has less of what the pods prefer of nodes or of links.
    Preference,
    /// Its free devices would lose more of their worth to later pods.
    Stranded,
    /// More devices are free around the node.
    Surroundings,
    /// It is as good; the first name is chosen.
    Name,
}

/// Most levels: of more the widest are kept.
const MAX_LEVELS: usize = 8;
/// Most other domains of a level.
const MAX_OTHERS: usize = 3;
/// Longest name, in bytes: that of a node.
const MAX_NAME: usize = 253;

/// Truncates a name.
pub(super) fn shorten(name: &mut String) {
    if name.len() > MAX_NAME {
        name.truncate(name.floor_char_boundary(MAX_NAME));
    }
}

impl CountedDevices {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
    fn is_free(&self) -> bool {
        *self == Self::Free
    }
}

impl ComparedFabric {
    /// Other domains that are kept of each level.
    pub const MAX_OTHERS: usize = MAX_OTHERS;

    /// A comparison of bounded size.
    pub fn new(members: u32, mut levels: Vec<ComparedLevel>) -> Self {
        levels.drain(..levels.len().saturating_sub(MAX_LEVELS));
        levels.iter_mut().for_each(|level| level.bound(MAX_OTHERS));
        Self { members, counted: CountedDevices::Free, levels }
    }

    /// The level at which one domain holds the gang.
    pub fn chosen(&self) -> Option<&ComparedLevel> {
        self.levels.last().filter(|level| level.chosen.is_some())
    }

    /// Reads it from an object. What another version wrote and this one cannot read is absent: the status stays
    /// readable.
    pub(crate) fn readable<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Arc<Self>>, D::Error> {
        let value = Option::<Value>::deserialize(from)?;
        let read = value.and_then(|value| Self::deserialize(value).ok());
        Ok(read.map(|read| {
            let Self { members, counted, levels } = read;
            Arc::new(Self { counted, ..Self::new(members, levels) })
        }))
    }
}

impl ComparedLevel {
    /// Keeps `others` other domains, and bounds every name.
    pub(super) fn bound(&mut self, others: usize) {
        self.others.truncate(others);
        shorten(&mut self.level);
        self.chosen.iter_mut().for_each(shorten);
        for other in &mut self.others {
            shorten(&mut other.domain);
            other.level.iter_mut().for_each(shorten);
        }
    }
}

impl fmt::Display for CountedDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Free => "by the devices that were free",
            Self::OnRails => "by the free devices on the rails that the gang uses",
            Self::AfterPreemption => "by the devices that are free once what the gang displaces is gone",
        })
    }
}

/// One sentence without its full stop: the domain that was chosen, and the next best one.
impl fmt::Display for ComparedFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Of the cluster as a whole there is one: the level below shows why it is needed.
        let shown = self.levels.iter().rev().find(|level| level.domains > 1).or(self.levels.last());
        let Some(level) = shown else {
            return Ok(());
        };
        let mut words = level.to_string();
        // The first letter is of the alphabet.
        words.get_mut(..1).into_iter().for_each(str::make_ascii_uppercase);
        f.write_str(&words)?;
        match level.others.first() {
            Some(next) => write!(f, "; next {next}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for ComparedLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { level, domains, holding, used, .. } = self;
        let all = plural(*domains, level);
        match (&self.chosen, holding, domains) {
            (None, ..) => write!(f, "none of {domains} {all} holds the gang, which uses {used}"),
            (Some(_), _, 1) => write!(f, "the only {level}"),
            (Some(_), 0 | 1, _) => write!(f, "the only one of {domains} {all} that holds the gang"),
            (Some(_), ..) => {
                write!(f, "the best of {holding} {} that hold the gang", plural(*holding, level))
            }
        }
    }
}

fn plural(count: u32, noun: &str) -> Cow<'_, str> {
    if count == 1 { noun.into() } else { format!("{noun}s").into() }
}

impl fmt::Display for ComparedDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, chosen) = (self.value.unwrap_or_default(), self.chosen_value.unwrap_or_default());
        write!(f, "{}: ", self.domain)?;
        match self.reason {
            DomainLoss::Members => write!(f, "{value} of {chosen} members fit"),
            DomainLoss::Devices => write!(f, "{value} of {chosen} devices are free"),
            DomainLoss::Rules => {
                write!(f, "rules among the members or their mix leave no packing that was found")
            }
            DomainLoss::Model => write!(f, "the pods list its model later"),
            DomainLoss::Cost => write!(f, "costs more, and the pods ask for economy"),
            DomainLoss::Link => write!(f, "as fast within the nodes, over farther links"),
            DomainLoss::Bandwidth if self.value.is_none() => write!(f, "lower bandwidth within the nodes"),
            DomainLoss::Bandwidth => {
                #[expect(clippy::cast_precision_loss, reason = "bandwidths are far below 2^52 MB/s")]
                let gbs = |mbs: i64| mbs as f64 / 1e3;
                write!(f, "{} instead of {} GB/s within the nodes", gbs(value), gbs(chosen))
            }
            DomainLoss::Parts => {
                let level = self.level.as_deref().unwrap_or("domain");
                let count = u32::try_from(value).unwrap_or(u32::MAX);
                write!(f, "needs {value} {} instead of {chosen}", plural(count, level))
            }
            DomainLoss::LeftOver => write!(f, "room for {value} more members instead of {chosen}"),
            DomainLoss::FreeDevices => write!(f, "{value} free devices instead of {chosen}"),
            DomainLoss::Nodes => write!(f, "needs {value} nodes instead of {chosen}"),
            DomainLoss::Uneven => write!(f, "up to {value} members on a node instead of {chosen}"),
            DomainLoss::Preference => write!(f, "meets less of what the pods prefer"),
            DomainLoss::Stranded => write!(f, "would break up more of its free devices"),
            DomainLoss::Surroundings => write!(f, "{value} devices free around it instead of {chosen}"),
            DomainLoss::Name => write!(f, "as good, later by name"),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{GangStatus, MAX_MESSAGE};

    fn other(domain: &str, reason: DomainLoss, values: Option<(i64, i64)>) -> ComparedDomain {
        ComparedDomain {
            domain: domain.into(),
            reason,
            value: values.map(|(value, _)| value),
            chosen_value: values.map(|(_, chosen)| chosen),
            level: None,
        }
    }

    pub(in super::super) fn level() -> ComparedLevel {
        let others = vec![
            other("rack r3", DomainLoss::LeftOver, Some((4, 0))),
            other("rack r4", DomainLoss::Bandwidth, Some((24_000, 48_500))),
        ];
        ComparedLevel {
            level: "rack".into(),
            domains: 12,
            holding: 5,
            used: 1,
            chosen: Some("rack r7".into()),
            others,
        }
    }

    pub(in super::super) fn long_level() -> ComparedLevel {
        let name = || "n".repeat(10_000);
        let long = || ComparedDomain {
            level: Some(name()),
            ..other(&name(), DomainLoss::Parts, Some((i64::MIN, i64::MIN)))
        };
        ComparedLevel {
            level: name(),
            domains: u32::MAX,
            holding: u32::MAX,
            used: u32::MAX,
            chosen: Some(name()),
            others: (0..100).map(|_| long()).collect(),
        }
    }

    #[test]
    fn comparison_is_bounded_whatever_it_is_made_of() {
        let compared = ComparedFabric::new(u32::MAX, vec![long_level(); 100]);
        assert_eq!((compared.levels.len(), compared.levels[0].others.len()), (8, 3));
        assert!(serde_json::to_string(&compared).unwrap().len() < 24 << 10);
        let status = GangStatus { compared: Some(Arc::new(compared)), ..GangStatus::default() };
        let text = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<GangStatus>(&text).unwrap(), status);
    }

    /// Users may write the status of a Gang by hand, and other versions have other reasons.
    #[test]
    fn unreadable_comparison_leaves_the_status_readable() {
        let known = r#"{"members": 4, "levels": [{"level": "rack", "domains": 2, "holding": 1, "used": 1,
            "others": [{"domain": "rack r1", "reason": "Members", "value": 3, "chosenValue": 4}]}]}"#;
        let read = |compared: &str| -> GangStatus {
            serde_json::from_str(&format!(r#"{{"domain": "rack r7", "compared": {compared}}}"#)).unwrap()
        };
        assert_eq!(
            read(known).compared.unwrap().levels[0].others[0].to_string(),
            "rack r1: 3 of 4 members fit"
        );
        for compared in [known.replace("Members", "Colour").as_str(), "7", "null"] {
            let status = read(compared);
            assert_eq!((status.domain.as_str(), status.compared), ("rack r7", None));
        }
    }

    #[test]
    fn sentence_names_the_choice_and_the_next_best_domain() {
        let of = |level: ComparedLevel| ComparedFabric::new(8, vec![level]).to_string();
        assert_eq!(
            of(level()),
            "The best of 5 racks that hold the gang; next rack r3: room for 4 more members instead of 0"
        );
        let members = vec![other("rack r3", DomainLoss::Members, Some((6, 8)))];
        assert_eq!(
            of(ComparedLevel { holding: 1, others: members.clone(), ..level() }),
            "The only one of 12 racks that holds the gang; next rack r3: 6 of 8 members fit"
        );
        let none = ComparedLevel { holding: 0, used: 2, chosen: None, others: members, ..level() };
        let cluster = ComparedLevel {
            level: "cluster".into(),
            domains: 1,
            holding: 1,
            used: 1,
            chosen: Some("cluster".into()),
            others: Vec::new(),
        };
        assert_eq!(
            ComparedFabric::new(8, vec![none, cluster.clone()]).to_string(),
            "None of 12 racks holds the gang, which uses 2; next rack r3: 6 of 8 members fit"
        );
        assert_eq!(of(cluster), "The only cluster");
        assert_eq!(
            other("rack r4", DomainLoss::Bandwidth, Some((24_000, 48_500))).to_string(),
            "rack r4: 24 instead of 48.5 GB/s within the nodes"
        );
    }

    #[test]
    fn sentence_with_usual_names_fits_into_an_event() {
        let reasons = [
            DomainLoss::Members,
            DomainLoss::Devices,
            DomainLoss::Rules,
            DomainLoss::Model,
            DomainLoss::Cost,
            DomainLoss::Bandwidth,
            DomainLoss::Link,
            DomainLoss::Parts,
            DomainLoss::LeftOver,
            DomainLoss::FreeDevices,
            DomainLoss::Nodes,
            DomainLoss::Uneven,
            DomainLoss::Preference,
            DomainLoss::Stranded,
            DomainLoss::Surroundings,
            DomainLoss::Name,
        ];
        for reason in reasons {
            let others = vec![other("rack rack-with-a-long-name-17", reason, Some((20_000, 20_000)))];
            let text = ComparedFabric::new(8, vec![ComparedLevel { others, ..level() }]).to_string();
            assert!(text.len() < MAX_MESSAGE, "{text}");
        }
    }
}
