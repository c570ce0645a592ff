//! Why a pod has its node and its devices. The extender writes it with the Binding, beside the grant, so that it
//! outlives the extender. For people and `gantry explain`: no daemon reads it.

mod fabric;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use fabric::{ComparedDomain, ComparedFabric, ComparedLevel, CountedDevices, DomainLoss};

use crate::ids::NodeName;
use crate::text::ObjectMessage;

/// The explanation of one placement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// Of each resource the devices, their links and bandwidth, and what they leave free: one sentence each.
    pub devices: Vec<String>,
    /// The nodes that were compared. Absent for a member of a gang: its node was reserved with those of the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<ComparedNodes>,
    /// Where the gang of a member was placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang: Option<GangPlacement>,
}

/// Where a gang was placed, in short. The status of its Gang has the other levels ([`ComparedFabric`]).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GangPlacement {
    /// Name of the Gang object.
    pub object: String,
    /// The part of the fabric that holds the gang.
    pub domain: String,
    /// The level at which one domain holds the gang, with the next best domain. Absent if no domains were compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<ComparedLevel>,
}

/// The nodes that could have taken a pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ComparedNodes {
    /// How many could, the chosen one included.
    pub nodes: u32,
    /// The best of the others: one of each group of alike nodes, [`Placement::MAX_OTHERS`] at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<ComparedNode>,
}

/// A node that could have taken the pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ComparedNode {
    /// Its name.
    pub node: NodeName,
    /// How many nodes are alike, this one included.
    pub alike: u32,
    /// Why it was not chosen.
    pub loss: Loss,
}

/// The first difference, in the order in which nodes are compared.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all_fields = "camelCase")]
pub enum Loss {
    /// Its devices are about to go to other pods.
    Reserved,
    /// The pod lists the model of the chosen node's GPUs first.
    Model,
    /// It meets less of what the pod prefers.
    Preference,
    /// It costs more, and the pod asks for economy.
    Cost,
    /// The pod's GPUs would have less bandwidth among them.
    Bandwidth {
        /// GB/s there.
        gbs: f64,
        /// GB/s on the chosen node.
        chosen_gbs: f64,
    },
    /// The pod's GPUs would be as fast, over a farther link.
    Link,
    /// Its free GPUs would lose more of their worth to later pods.
    Stranded,
    /// More of its GPUs would stay free: pods are packed.
    Emptier,
    /// Fewer of its GPUs would stay free: pods are spread.
    Fuller,
    /// It is as good; the first name wins.
    Name,
}

impl Placement {
    /// Most other nodes that are named.
    pub const MAX_OTHERS: usize = 3;
    /// Most sentences about devices: a pod seldom asks for more resources.
    const MAX_SENTENCES: usize = 4;

    /// An explanation of bounded size: `devices` has one sentence per resource, of which the first few are kept.
    pub fn new(devices: impl IntoIterator<Item = String>, compared: Option<ComparedNodes>) -> Self {
        let devices = devices.into_iter().take(Self::MAX_SENTENCES);
        let devices = devices.map(|sentence| ObjectMessage::new(sentence).into()).collect();
        let compared = compared.map(|mut compared| {
            compared.others.truncate(Self::MAX_OTHERS);
            compared
        });
        Self { devices, compared, gang: None }
    }

    /// The placement of a member of a gang.
    #[must_use]
    pub fn of_gang(self, gang: Option<GangPlacement>) -> Self {
        Self { gang: gang.map(GangPlacement::bounded), ..self }
    }

    /// One line: the devices on their node, and the next best node.
    pub fn on(&self, node: &NodeName) -> String {
        let mut text = format!("{node}: {}", self.devices.join(". "));
        if let Some(compared) = &self.compared {
            text.push_str(&format!(". {compared}"));
        }
        if let Some(gang) = &self.gang {
            text.push_str(&format!(". {gang}"));
        }
        text
    }
}

impl GangPlacement {
    /// The same in few bytes: the next best domain only.
    fn bounded(mut self) -> Self {
        fabric::shorten(&mut self.object);
        fabric::shorten(&mut self.domain);
        if let Some(level) = &mut self.level {
            level.bound(1);
        }
        self
    }
}

impl fmt::Display for GangPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.domain.as_str() {
            "" => write!(f, "Placed with gang {}", self.object),
            domain => write!(f, "Placed with gang {} in {domain}", self.object),
        }
    }
}

impl fmt::Display for ComparedNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.nodes, self.others.first()) {
            (1, _) => write!(f, "The only node that fits"),
            (nodes, None) => write!(f, "The best of {nodes} nodes that fit"),
            (nodes, Some(next)) => write!(f, "The best of {nodes} nodes that fit; next {next}"),
        }
    }
}

impl fmt::Display for ComparedNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.alike {
            0 | 1 => write!(f, "{}: {}", self.node, self.loss),
            alike => write!(f, "{} and {} alike: {}", self.node, alike - 1, self.loss),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reserved => write!(f, "its devices are about to go to other pods"),
            Self::Model => write!(f, "the pod lists its model later"),
            Self::Preference => write!(f, "meets less of what the pod prefers"),
            Self::Cost => write!(f, "costs more, and the pod asks for economy"),
            Self::Bandwidth { gbs, chosen_gbs } => write!(f, "{gbs} instead of {chosen_gbs} GB/s"),
            Self::Link => write!(f, "as fast, over a farther link between its GPUs"),
            Self::Stranded => write!(f, "would break up more of its free GPUs"),
            Self::Emptier => write!(f, "has more free GPUs, and pods are packed"),
            Self::Fuller => write!(f, "has fewer free GPUs, and pods are spread"),
            Self::Name => write!(f, "as good, later by name"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MAX_MESSAGE;

    fn other(alike: u32, loss: Loss) -> ComparedNode {
        ComparedNode { node: "desk".into(), alike, loss }
    }

    #[test]
    fn placement_is_read_as_it_is_written() {
        let losses = [
            Loss::Reserved,
            Loss::Model,
            Loss::Preference,
            Loss::Cost,
            Loss::Bandwidth { gbs: 48.0, chosen_gbs: 80.0 },
            Loss::Link,
            Loss::Stranded,
            Loss::Emptier,
            Loss::Fuller,
            Loss::Name,
        ];
        for loss in losses {
            let compared = ComparedNodes { nodes: 5, others: vec![other(2, loss)] };
            let placement = Placement::new(["GPUs 0,1".to_owned()], Some(compared));
            let text = serde_json::to_string(&placement).unwrap();
            assert_eq!(serde_json::from_str::<Placement>(&text).unwrap(), placement, "{text}");
        }
        let member = Placement::new(["GPU 3".to_owned()], None);
        assert_eq!(serde_json::to_string(&member).unwrap(), r#"{"devices":["GPU 3"]}"#);
        let gang = GangPlacement {
            object: "train".into(),
            domain: "rack r7".into(),
            level: Some(fabric::tests::level()),
        };
        let member = member.of_gang(Some(gang));
        assert_eq!(member.gang.as_ref().unwrap().level.as_ref().unwrap().others.len(), 1);
        let text = serde_json::to_string(&member).unwrap();
        assert_eq!(serde_json::from_str::<Placement>(&text).unwrap(), member, "{text}");
        assert_eq!(member.on(&"dgx1".into()), "dgx1: GPU 3. Placed with gang train in rack r7");
    }

    #[test]
    fn placement_is_bounded_whatever_it_is_made_of() {
        let others =
            vec![ComparedNode { node: "n".repeat(253).as_str().into(), ..other(9, Loss::Name) }; 100];
        let long = vec!["\u{1b}".repeat(10_000); 100];
        let placement = Placement::new(long, Some(ComparedNodes { nodes: 100, others }));
        assert!(placement.devices.iter().all(|sentence| sentence.len() <= MAX_MESSAGE));
        assert!(serde_json::to_string(&placement).unwrap().len() < 4096);
        let long = || "n".repeat(10_000);
        let gang = GangPlacement { object: long(), domain: long(), level: Some(fabric::tests::long_level()) };
        let member = Placement::new(Vec::new(), None).of_gang(Some(gang));
        assert!(serde_json::to_string(&member).unwrap().len() < 2048);
    }

    #[test]
    fn line_names_the_next_best_node() {
        let near = other(3, Loss::Bandwidth { gbs: 48.0, chosen_gbs: 80.0 });
        let of =
            |nodes, others| Placement::new(["GPUs 0,1: x".to_owned()], Some(ComparedNodes { nodes, others }));
        let on = |placement: Placement| placement.on(&"dgx1".into());
        assert_eq!(
            on(of(12, vec![near])),
            "dgx1: GPUs 0,1: x. The best of 12 nodes that fit; next desk and 2 alike: 48 instead of 80 GB/s"
        );
        assert_eq!(on(of(1, Vec::new())), "dgx1: GPUs 0,1: x. The only node that fits");
        assert_eq!(on(Placement::new(["GPU 3".to_owned()], None)), "dgx1: GPU 3");
    }
}
