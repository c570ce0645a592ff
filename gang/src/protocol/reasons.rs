//! Why a gang, or one of its members, is as it is: a [`Reason`] with its facts, and the one table of their texts.
//!
//! Each has two texts. The stable one is for pods: kube-scheduler retries a pod whenever its message changes, so it has no number that
//! changes by itself. The full one is for the Gang, and adds such numbers. Details of a plan are shown by `gantry explain`.

use std::fmt;
use std::sync::Arc;

use gantry_api::{DeviceId, NodeName, ObjectMessage, Reason};

use k8s_openapi::jiff::Timestamp;

use crate::counted::{are, exist as verb, members};
use crate::key::GangKey;
use crate::membership::OwnerRef;
use crate::needs::Misfit;
use crate::resources::InsufficientResource;
use crate::terms::Fault;

/// Causes that one text names.
const NAMED: usize = 2;

/// Why a member waits, in the words that filter returns: also for members for which kube-scheduler never calls filter, because a gate of
/// ours keeps them from it, or a plugin has refused them first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitReason {
    /// For programs.
    pub reason: Reason,
    /// For people. It stays the same while the reason does.
    pub message: Arc<str>,
}

impl WaitReason {
    pub(super) fn new(gang: &GangKey, reason: Reason, text: &str) -> Self {
        Self { reason, message: ObjectMessage::new(format!("gang {gang}: {reason}: {text}")).into() }
    }

    /// Whether what the gang or the pod declares contradicts itself, or cannot be followed.
    pub fn is_invalid(&self) -> bool {
        matches!(self.reason, Reason::Invalid | Reason::InvalidMember)
    }

    /// The node of a member's reservation is not offered.
    pub(super) fn node_not_offered(gang: &GangKey, node: &NodeName) -> Self {
        let text = format!("its reservation is on node {node}, which kube-scheduler does not offer");
        Self::new(gang, Reason::NodeNotOffered, &text)
    }

    /// A member is brought to another node than that of its reservation.
    pub(super) fn reserved_elsewhere(gang: &GangKey, node: &NodeName) -> Self {
        Self::new(gang, Reason::ReservationChanged, &format!("its reservation is on node {node} now"))
    }

    /// A member is brought to another node than the one it is bound to.
    pub(super) fn bound_elsewhere(gang: &GangKey, node: &NodeName) -> Self {
        Self::new(gang, Reason::ReservationChanged, &format!("the pod is bound to node {node}"))
    }

    pub(super) fn terminating(gang: &GangKey) -> Self {
        Self::new(gang, Reason::PodTerminating, Reason::PodTerminating.text())
    }

    pub(super) fn invalid_member(gang: &GangKey, fault: &Fault) -> Self {
        Self::new(gang, Reason::InvalidMember, &fault.to_string())
    }
}

/// Why pods of a gang are deleted; `to`: the gang that it yields to.
pub(super) fn restart_note(gang: &GangKey, to: Option<&GangKey>) -> Arc<str> {
    match to {
        Some(to) => format!("gang {gang} yields to gang {to} and is restarted"),
        None => format!("gang {gang} has lost a member and is restarted"),
    }
    .into()
}

/// Reason and texts of a cause.
struct Texts {
    reason: Reason,
    /// Without numbers that change by themselves.
    stable: String,
    /// Added for the Gang; empty if there is nothing to add.
    detail: String,
}

impl Texts {
    fn new(reason: Reason, stable: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { reason, stable: stable.into(), detail: detail.into() }
    }

    /// A reason with its text from the table of reasons.
    fn plain(reason: Reason, detail: impl Into<String>) -> Self {
        Self::new(reason, reason.text(), detail)
    }

    fn message(self) -> String {
        let text = match self.detail.is_empty() {
            true => self.stable,
            false => format!("{}; {}", self.stable, self.detail),
        };
        ObjectMessage::new(text).into()
    }
}

/// Why a gang gets no reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Fewer members exist than have to be placed.
    TooFewMembers {
        /// So many have to be placed.
        must: u32,
        exist: u32,
    },
    /// What a member requests is not known yet.
    UnknownRequest,
    /// The fabric has no such level.
    UnknownLevel {
        /// The level that the gang names.
        level: Arc<str>,
        /// The levels that there are.
        known: Vec<Arc<str>>,
    },
    /// Too few of its members fit.
    DoesNotFit(Box<Shortage>),
    /// It fits only on different rails, and requires the same on every node.
    RailsTaken(Box<RailShortage>),
    /// It fits only on nodes that are reserved for another gang.
    NodesReserved {
        /// The gang that they are reserved for.
        gang: Arc<GangKey>,
    },
    /// It fits once pods that are being deleted are gone.
    PodsTerminating,
    /// A device of the plan is reserved already.
    Overtaken {
        device: DeviceId,
        node: NodeName,
        /// The gang that has it; `None` if the plan has it twice.
        by: Option<Arc<GangKey>>,
    },
    /// The plan has fewer reservations than the minimum, or than a role needs.
    PlanTooSmall,
    /// The plan evicts pods for members of a gang that is decided.
    PlanEvicts,
    /// Its decision would be larger than etcd takes.
    DecisionTooLarge {
        /// The minimum of the gang.
        members: u32,
        /// Bytes of one reservation, rounded: the same wherever the gang is planned.
        each: usize,
        /// Most members of this kind.
        most: usize,
    },
}

impl Refusal {
    /// For programs.
    pub fn reason(&self) -> Reason {
        match self {
            Self::TooFewMembers { .. } => Reason::WaitingForMembers,
            Self::UnknownRequest => Reason::UnknownSize,
            Self::UnknownLevel { .. } | Self::DecisionTooLarge { .. } => Reason::CannotFit,
            Self::DoesNotFit(shortage) => shortage.reason(),
            Self::PlanTooSmall | Self::PlanEvicts | Self::RailsTaken(_) => Reason::InsufficientResources,
            Self::NodesReserved { .. } => Reason::NodesReserved,
            Self::PodsTerminating => Reason::WaitingForTerminatingPods,
            Self::Overtaken { .. } => Reason::WaitingForTurn,
        }
    }

    /// Whether the cluster would not hold it even if nothing else were there.
    pub fn is_hopeless(&self) -> bool {
        self.reason() == Reason::CannotFit
    }

    /// The text for the Gang.
    pub fn message(&self) -> String {
        self.texts().message()
    }

    /// The text for its pods.
    pub fn stable(&self) -> String {
        ObjectMessage::new(self.texts().stable).into()
    }

    fn texts(&self) -> Texts {
        let reason = self.reason();
        match self {
            Self::TooFewMembers { must, exist } => {
                let text = format!("{} must be placed; {exist} {}", members(*must), verb(*exist));
                Texts::new(reason, text, "")
            }
            Self::UnknownRequest => Texts::new(reason, "what a member requests is not known yet", ""),
            Self::UnknownLevel { level, known } => {
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                Texts::new(reason, format!("the fabric has no level {level}; it has: {known}"), "")
            }
            Self::DoesNotFit(shortage) => {
                Texts::new(reason, shortage.stable(), shortage.detail().unwrap_or_default())
            }
            Self::RailsTaken(shortage) => Texts::new(reason, shortage.stable(), shortage.detail()),
            Self::NodesReserved { gang } => {
                let text = format!("it fits only on nodes that are reserved for gang {gang}");
                Texts::new(reason, text, "")
            }
            Self::PodsTerminating => Texts::plain(reason, ""),
            Self::Overtaken { device, node, by } => {
                let by = by.as_ref().map_or("another member".to_owned(), |gang| format!("gang {gang}"));
                let detail = format!("device {device} of node {node} is reserved for {by}");
                Texts::new(reason, "a planned device was reserved meanwhile", detail)
            }
            Self::PlanTooSmall => {
                Texts::new(reason, "the plan has fewer reservations than the gang or a role needs", "")
            }
            Self::PlanEvicts => {
                Texts::new(reason, "no pod is evicted for members of a gang that is decided", "")
            }
            Self::DecisionTooLarge { members, each, most } => Texts::new(
                reason,
                format!(
                    "the decision for {members} members of about {each} bytes each is too large for etcd; at most {most} such members fit"
                ),
                "make it several gangs, or give each pod more devices",
            ),
        }
    }
}

/// The same rails are not free on enough nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RailShortage {
    /// The members that have to fit.
    pub members: Vec<MemberGroup>,
    /// The rails that are free for a member on most nodes, in words, and how many nodes; `None` where members differ in
    /// size, and if the NICs of no node are known.
    pub best: Option<(Arc<str>, usize)>,
}

impl RailShortage {
    fn stable(&self) -> String {
        let needs = Shortage { members: self.members.clone(), ..Shortage::default() }.part_request("");
        format!("{needs} with the same NIC indices on every node; on different ones they would fit")
    }

    fn detail(&self) -> String {
        match &self.best {
            Some((nics, 1)) => format!("at best, GPUs next to {nics} are free on 1 node"),
            Some((nics, nodes)) => format!("at best, GPUs next to {nics} are free on {nodes} nodes"),
            None => "no node has known NICs next to enough free GPUs of one size".to_owned(),
        }
    }
}

/// Too few members of a gang fit, in numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shortage {
    /// Only a part of the gang, which does not fit even by itself: the name of its role, empty if it has none.
    pub part: Option<Arc<str>>,
    /// The members that wait: how many request the same.
    pub members: Vec<MemberGroup>,
    /// So many of them have to fit together; 0 where each is useful by itself.
    pub must: u32,
    /// Where they have to fit.
    pub within: ReasonScope,
    /// The part of the fabric where most fit; empty for the cluster.
    pub best: Arc<str>,
    /// How many of those that have to fit do fit together there now.
    pub fits: u32,
    /// How many would fit together in the best part of an empty cluster.
    pub empty: u32,
    /// Devices of the best part, of the first resource that is short there.
    pub devices: Option<DeviceShortage>,
    /// What keeps members off nodes that have the devices.
    pub obstacles: Option<Obstacles>,
    /// The spread constraint without which they would fit.
    pub skew: Option<SkewLimit>,
    /// The rule among the members without which they would fit.
    pub rule: Option<MemberRule>,
    /// Even the largest node has too few devices for one member.
    pub largest: Option<LargestNode>,
    /// They would fit if these nodes gave out their devices.
    pub withheld: Option<WithheldNodes>,
    /// They would fit on devices that are idle and reserved for others.
    pub reserved: Option<IdleReservations>,
    /// They would not fit on an empty cluster.
    pub hopeless: bool,
}

/// Members of one shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberGroup {
    /// How many.
    pub count: u32,
    /// What each requests: the unit (`GPUs`, or a resource) and how many.
    pub requests: Vec<(Arc<str>, u32)>,
}

/// Where members have to fit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ReasonScope {
    /// Anywhere.
    #[default]
    Cluster,
    /// In one domain of a level.
    OneOf(Arc<str>),
    /// Each slice in one domain of a level.
    SlicesOf {
        /// Members of a slice.
        size: u32,
        level: Arc<str>,
    },
}

/// Devices of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceShortage {
    /// `GPUs`, or the resource.
    pub unit: Arc<str>,
    /// Free now.
    pub free: usize,
    /// Idle, and reserved for others.
    pub reserved: usize,
    /// Not unhealthy.
    pub healthy: usize,
    pub total: usize,
    /// Requested by the minimum together.
    pub requested: u64,
}

/// The most devices that a node has, too few for one member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LargestNode {
    /// `GPUs`, or the resource.
    pub unit: Arc<str>,
    /// Requested by one member.
    pub requested: u32,
    /// The most on one node.
    pub devices: usize,
    /// The most healthy ones on one node.
    pub healthy: usize,
}

/// Why new pods get no device of a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WithheldReason {
    /// The plugin does not serve, or cannot read the truth: the reason of its condition. Kubelet would refuse a pod for
    /// good.
    ByPlugin(Arc<str>),
    /// Another program marks the node: what it does, and the mark.
    ByMark(Arc<str>),
}

impl fmt::Display for WithheldReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ByPlugin(reason) => write!(f, "GPU plugin is not ready: {reason}"),
            Self::ByMark(text) => write!(f, "GPUs are withheld: {text}"),
        }
    }
}

/// Nodes that give out no device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WithheldNodes {
    /// The most frequent cause.
    pub cause: WithheldReason,
    pub nodes: usize,
}

/// Devices that are idle and reserved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdleReservations {
    /// By gang, the most devices first. The planner does not know gangs: it leaves this empty.
    pub holders: Vec<Holder>,
}

/// A gang with reserved devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The gang: `namespace/name`.
    pub gang: Arc<str>,
    pub devices: usize,
    /// When the reservation ends at the latest if its members do not arrive, in seconds since 1970.
    pub until: Option<i64>,
}

impl Holder {
    /// The gang and the time limit: `gang ml/train until 2026-11-25T10:00:00Z`.
    pub fn gang_and_limit(&self) -> String {
        let until = self.until.and_then(|until| Timestamp::from_second(until).ok());
        let until = until.map_or_else(String::new, |until| format!(" until {until}"));
        format!("gang {}{until}", self.gang)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.devices, self.gang_and_limit())
    }
}

/// What keeps members off nodes that have the devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacles {
    /// The unit of the devices.
    pub unit: Arc<str>,
    /// Nodes that have the devices; `None` where the numbers of nodes change by themselves.
    pub nodes: Option<usize>,
    /// Each obstacle, with the nodes that it keeps members off.
    pub found: Vec<(Obstacle, usize)>,
}

/// What keeps a member off a node that has the devices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Obstacle {
    /// The node is cordoned.
    Cordon,
    /// The pod does not tolerate the taint with this key.
    Taint(Arc<str>),
    /// The node selector, or required node affinity.
    NodeAffinity,
    /// The affinity of a volume.
    Volume,
    /// The link, the bandwidth or the GPU models that the pod requires.
    PlacementTerms,
    /// The Topology Manager of the node's kubelet.
    TopologyManager,
    /// Pod affinity, anti-affinity or host ports.
    OtherPods,
    /// Another resource.
    Resource(InsufficientResource),
}

impl From<Misfit> for Obstacle {
    fn from(misfit: Misfit) -> Self {
        match misfit {
            Misfit::Unschedulable => Self::Cordon,
            Misfit::Taint { key, .. } => Self::Taint(key),
            Misfit::Affinity => Self::NodeAffinity,
            Misfit::Volume => Self::Volume,
        }
    }
}

impl Obstacle {
    fn text(&self) -> String {
        match self {
            Self::Cordon => "cordons rule out".to_owned(),
            Self::Taint(key) => format!("taint {key} rules out"),
            Self::NodeAffinity => "the node selector or affinity rules out".to_owned(),
            Self::Volume => "the affinity of a volume rules out".to_owned(),
            Self::PlacementTerms => "the required link, bandwidth or GPU model rules out".to_owned(),
            Self::TopologyManager => "kubelet's Topology Manager rules out".to_owned(),
            Self::OtherPods => "pod affinity, anti-affinity or host ports rule out".to_owned(),
            Self::Resource(lack) => format!("{} on", lack.short()),
        }
    }
}

impl Obstacles {
    fn text(&self) -> String {
        let unit = &self.unit;
        let Some(nodes) = self.nodes else {
            let named: Vec<String> =
                self.found.iter().take(NAMED).map(|(obstacle, _)| obstacle.text()).collect();
            return format!("{} nodes that have the {unit} free", named.join(" and "));
        };
        match (self.found.as_slice(), nodes) {
            ([(obstacle, 1)], 1) => format!("{} the only node that has the {unit}", obstacle.text()),
            ([(obstacle, of)], _) if *of == nodes => {
                format!("{} all {nodes} nodes that have the {unit}", obstacle.text())
            }
            (found, _) => {
                let named =
                    found.iter().take(NAMED).map(|(obstacle, of)| format!("{} {of}", obstacle.text()));
                format!("of {nodes} nodes that have the {unit} {}", named.collect::<Vec<_>>().join(", "))
            }
        }
    }
}

/// A topology spread constraint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SkewLimit {
    /// The label that makes its domains.
    pub key: Arc<str>,
    /// What of it fails.
    pub fails: SkewFailure,
}

/// A rule among the members of a gang about each other's nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemberRule {
    /// Required pod affinity: they share the value of this node label.
    Together(Arc<str>),
    /// Anti-affinity or host ports: some cannot share a node, or the value of a node label.
    Apart,
}

impl MemberRule {
    fn text(&self) -> String {
        match self {
            Self::Together(key) => format!("pod affinity requires members together in one {key}"),
            Self::Apart => "anti-affinity or host ports keep members apart".to_owned(),
        }
    }
}

/// What of a spread constraint fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkewFailure {
    /// A domain would have more than `maxSkew` above the one with the fewest.
    MaxSkew(u32),
    /// Fewer domains exist than `minDomains`.
    MinDomains {
        /// `minDomains`.
        wanted: u32,
        /// Domains that exist.
        exist: usize,
    },
    /// No node that the members may go to has the label.
    NoDomain,
}

impl SkewLimit {
    fn text(&self) -> String {
        let Self { key, fails } = self;
        match fails {
            SkewFailure::MinDomains { wanted, exist } => format!(
                "minDomains {wanted} of a topologySpreadConstraint needs {wanted} domains of {key}; {exist} exist"
            ),
            SkewFailure::MaxSkew(max) => format!(
                "topologySpreadConstraints allow no {key} more than {max} above the one with the fewest"
            ),
            SkewFailure::NoDomain => {
                format!("a topologySpreadConstraint needs the node label {key}, which no allowed node has")
            }
        }
    }
}

impl Shortage {
    /// `needs 12 GPUs as 4x3 within one rack`.
    fn request(&self) -> String {
        let total: u32 = self.members.iter().map(|group| group.count).sum();
        let one = |requests: &[(Arc<str>, u32)]| {
            let parts: Vec<String> = requests.iter().map(|(unit, count)| devices(*count, unit)).collect();
            parts.join(" with ")
        };
        match self.members.as_slice() {
            [MemberGroup { requests, .. }] if total > 1 && self.must <= 1 => {
                format!("needs {} for one more of {total} members", one(requests))
            }
            [MemberGroup { count, requests }] => match requests.as_slice() {
                [(unit, each)] if *count > 1 => {
                    let least = self.must.clamp(1, *count);
                    format!("needs {} as {least}x{each}", devices(least.saturating_mul(*each), unit))
                }
                _ if *count > 1 => format!("needs {}x({})", self.must.clamp(1, *count), one(requests)),
                _ => format!("needs {}", one(requests)),
            },
            groups => {
                let unit = self.devices.as_ref().map(|devices| &devices.unit);
                let alike = |group: &MemberGroup| match group.requests.as_slice() {
                    [(of, each)] if Some(of) == unit => Some(group.count.saturating_mul(*each)),
                    _ => None,
                };
                let sum = groups.iter().map(alike).try_fold(0, |sum: u32, of| sum.checked_add(of?));
                let parts = groups.iter().map(|MemberGroup { count, requests }| match requests.as_slice() {
                    [(_, each)] if sum.is_some() => format!("{count}x{each}"),
                    _ => format!("{count}x({})", one(requests)),
                });
                let parts = parts.collect::<Vec<_>>().join(" and ");
                match (sum, unit, self.must) {
                    (.., 0 | 1) => format!("needs room for one more of {parts}"),
                    (.., must) if must < total => format!("needs {must} of {parts}"),
                    (Some(sum), Some(unit), _) => format!("needs {} as {parts}", devices(sum, unit)),
                    _ => format!("needs {parts}"),
                }
            }
        }
    }

    /// For programs.
    fn reason(&self) -> Reason {
        match self {
            Self { hopeless: true, .. } => Reason::CannotFit,
            Self { withheld: Some(nodes), .. } => match nodes.cause {
                WithheldReason::ByPlugin(_) => Reason::PluginNotReady,
                WithheldReason::ByMark(_) => Reason::NodesWithheld,
            },
            Self { reserved: Some(_), .. } => Reason::GpusReserved,
            _ => Reason::InsufficientResources,
        }
    }

    /// `role big needs 1 member of 9 GPUs`.
    fn part_request(&self, role: &str) -> String {
        let groups: Vec<String> = self
            .members
            .iter()
            .map(|MemberGroup { count, requests }| {
                let parts: Vec<String> = requests.iter().map(|(unit, count)| devices(*count, unit)).collect();
                format!("{} of {}", members(*count), parts.join(" with "))
            })
            .collect();
        let groups = groups.join(" and ");
        if role.is_empty() { format!("needs {groups}") } else { format!("role {role} needs {groups}") }
    }

    fn stable(&self) -> String {
        let mut text = self.part.as_ref().map_or_else(|| self.request(), |role| self.part_request(role));
        text = match self.withheld.as_ref().map(|nodes| &nodes.cause) {
            Some(WithheldReason::ByPlugin(reason)) => {
                format!("the GPU plugin is not ready on nodes that would hold the gang: {reason}; {text}")
            }
            Some(WithheldReason::ByMark(mark)) => {
                format!("GPUs of nodes that would hold the gang are withheld: {mark}; {text}")
            }
            None => text,
        };
        match &self.within {
            ReasonScope::Cluster => {}
            ReasonScope::OneOf(level) => text.push_str(&format!(" within one {level}")),
            ReasonScope::SlicesOf { size, level } => {
                text.push_str(&format!(" in slices of {size} within one {level} each"));
            }
        }
        if self.hopeless
            && let Some(largest) = &self.largest
        {
            let LargestNode { unit, requested, devices, .. } = largest;
            let kind = if *devices < *requested as usize { "" } else { "healthy " };
            text.push_str(&format!("; no node has {requested} {kind}{unit}"));
            return text;
        }
        if self.hopeless {
            let holds = match self.empty {
                _ if self.skew.is_some() || self.empty >= self.must.max(1) => "does not hold them".to_owned(),
                0 => "holds none".to_owned(),
                empty => format!("holds {empty}"),
            };
            text.push_str(&format!("; an empty cluster {holds}"));
        }
        if let Some(IdleReservations { holders }) = &self.reserved {
            let gangs: Vec<&str> = holders.iter().take(NAMED).map(|holder| &*holder.gang).collect();
            let others = match (gangs.as_slice(), holders.len().saturating_sub(NAMED)) {
                ([], _) => "pods that are being bound".to_owned(),
                ([gang], _) => format!("gang {gang}"),
                (gangs, 0) => format!("gangs {}", gangs.join(" and ")),
                (gangs, more) => format!("gangs {} and {more} more", gangs.join(", ")),
            };
            text.push_str(&format!("; what it lacks is idle and reserved for {others}"));
        }
        if let Some(skew) = &self.skew {
            text.push_str(&format!("; {}", skew.text()));
        } else if let Some(rule) = &self.rule {
            text.push_str(&format!("; {}", rule.text()));
        } else if let Some(obstacles) = &self.obstacles {
            text.push_str(&format!("; {}", obstacles.text()));
        }
        text
    }

    /// What is there now; `None` where that does not matter.
    fn detail(&self) -> Option<String> {
        if self.hopeless {
            return None;
        }
        let place = if self.best.is_empty() { String::new() } else { format!(" in {}", self.best) };
        let fits = match self.fits {
            0 => "no member fits".to_owned(),
            1 => "only 1 member fits".to_owned(),
            fits => format!("only {fits} members fit"),
        };
        let Some(DeviceShortage { unit, free, reserved, healthy, total, requested }) = &self.devices else {
            return Some(format!("{fits}{place}"));
        };
        let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let verb = are(narrow(*free));
        let idle = if *reserved > 0 { format!(", {reserved} idle and reserved") } else { String::new() };
        let mut text = format!("{free} {verb} free{place}{idle} and {fits}");
        if let Some(WithheldNodes { nodes, .. }) = &self.withheld {
            let nodes_are = if *nodes == 1 { "1 node serves" } else { &format!("{nodes} nodes serve") };
            text.push_str(&format!("; {nodes_are} no device"));
            return Some(text);
        }
        if let Some(IdleReservations { holders }) = &self.reserved {
            let named: Vec<String> = holders.iter().take(NAMED).map(ToString::to_string).collect();
            if !named.is_empty() {
                text.push_str(&format!("; reserved: {}", named.join(", ")));
            }
            return Some(text);
        }
        let requested = usize::try_from(*requested).unwrap_or(usize::MAX);
        if *free < requested && requested <= *healthy {
            let more = requested - free;
            let unit = if more == 1 && &**unit == "GPUs" { "GPU" } else { unit };
            text.push_str(&format!("; {more} more {unit} must come free"));
        } else if healthy < total {
            let unhealthy = narrow(total - healthy);
            text.push_str(&format!("; {} {} unhealthy", devices(unhealthy, unit), are(unhealthy)));
        }
        Some(text)
    }
}

fn devices(count: u32, unit: &str) -> String {
    match (count, unit) {
        (1, "GPUs") => "1 GPU".to_owned(),
        _ => format!("{count} {unit}"),
    }
}

/// Why an attempt to bind a gang failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// kube-scheduler does not offer the planned nodes; with what it reports.
    NodesNotOffered(Option<Arc<str>>),
    /// Too few members arrived in time; with what kube-scheduler reports.
    NotArrived { arrived: u32, min: u32, scheduler: Option<Arc<str>> },
    /// Victims were not gone in time; with what blocks their eviction.
    VictimsStayed(Vec<Arc<str>>),
    /// Pods were evicted for it, and devices that they left were lost before its minimum was bound.
    EvictedInVain,
    /// The API server rejected the decision.
    DecisionRejected(Arc<str>),
    /// Members beyond the minimum did not arrive in time.
    LateSurplus,
    /// Reservations were released and made again for long, and no member was bound.
    Unused,
}

impl Failure {
    fn text(&self) -> String {
        let reported = |scheduler: &Option<Arc<str>>| {
            let reported = scheduler.as_ref().map(|message| format!("; kube-scheduler reports: {message}"));
            reported.unwrap_or_default()
        };
        match self {
            Self::NodesNotOffered(scheduler) => {
                format!("kube-scheduler does not offer the planned nodes{}", reported(scheduler))
            }
            Self::NotArrived { arrived, min, scheduler } => {
                format!("{arrived} of {} arrived in time{}", members(*min), reported(scheduler))
            }
            Self::VictimsStayed(blocked) => {
                format!("the evicted pods were not gone in time{}", also(blocked))
            }
            Self::EvictedInVain => {
                "pods were evicted for it, but devices that they left are in use again or have failed"
                    .to_owned()
            }
            Self::DecisionRejected(why) => format!("the API server rejected the decision: {why}"),
            Self::LateSurplus => "members beyond the minimum did not arrive in time".to_owned(),
            Self::Unused => "its reservations stayed unused for long".to_owned(),
        }
    }
}

fn also(more: &[Arc<str>]) -> String {
    more.iter().map(|more| format!("; {more}")).collect()
}

/// Members that exist and do not count, and members that other schedulers place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct UncountedMembers {
    /// Kept back by scheduling gates that Gantry does not remove: the first one, and how many members.
    pub(super) gated: Option<(Arc<str>, u32)>,
    /// kube-scheduler rejects them before it calls the extender: the first, the reason it gives, and how many.
    pub(super) rejected: Option<(Arc<str>, Arc<str>, u32)>,
    /// Their declaration is not valid.
    pub(super) invalid: u32,
    /// By scheduler.
    pub(super) elsewhere: Vec<(Arc<str>, u32)>,
}

impl UncountedMembers {
    fn stable(&self) -> String {
        let mut text = String::new();
        if let Some((pod, why, count)) = &self.rejected {
            let more = if *count > 1 { format!(", and {} more", count - 1) } else { String::new() };
            text.push_str(&format!("; kube-scheduler rejects pod {pod}{more}: {why}"));
        }
        if let Some((gate, count)) = &self.gated {
            text.push_str(&format!("; kept back by scheduling gate {gate}: {count}"));
        }
        text.extend(self.elsewhere.iter().map(|(by, count)| format!("; scheduled by {by}: {count}")));
        text
    }

    fn detail(&self) -> String {
        if self.invalid > 0 { format!("; not valid: {}", self.invalid) } else { String::new() }
    }
}

/// Why members of a decided gang have no reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MissingReservations {
    /// No member waits for one.
    None,
    Turn,
    Invalid(Vec<Fault>),
    Refused(Refusal),
    Backoff(Failure),
}

impl MissingReservations {
    fn text(&self) -> Option<String> {
        Some(match self {
            Self::None => return None,
            Self::Turn => Reason::WaitingForTurn.text().to_owned(),
            Self::Invalid(faults) => faults.first().map(ToString::to_string).unwrap_or_default(),
            Self::Refused(refusal) => refusal.texts().stable,
            Self::Backoff(failure) => failure.text(),
        })
    }

    fn after(&self, text: String) -> String {
        match self.text() {
            Some(rest) => format!("{text}; {rest}"),
            None => text,
        }
    }
}

/// Why a gang runs with fewer members than its minimum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoRepair {
    OwnerFinished(OwnerRef),
    OwnerSuspended(OwnerRef),
    Policy,
}

/// Why a gang is in its phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cause {
    New,
    NotAGang {
        source: Arc<str>,
    },
    UnknownSize {
        why: Arc<str>,
        exist: u32,
        uncounted: UncountedMembers,
    },
    WaitingForMembers {
        exist: u32,
        min: u32,
        source: Arc<str>,
        unread: Option<OwnerRef>,
        uncounted: UncountedMembers,
    },
    WaitingForMoreMembers {
        exist: u32,
        total: Option<u32>,
        min: u32,
        uncounted: UncountedMembers,
    },
    MembersWithheld {
        exist: u32,
        min: u32,
        uncounted: UncountedMembers,
    },
    WaitingForRole {
        role: Arc<str>,
        exist: u32,
        min: u32,
        source: Arc<str>,
        uncounted: UncountedMembers,
    },
    Invalid(Vec<Fault>),
    GatesStay(Arc<str>),
    WaitingForTurn,
    Refused(Refusal),
    Backoff(Failure),
    WaitingForVictims {
        blocked: Vec<Arc<str>>,
    },
    VictimsTerminating,
    WaitingForArrival {
        arrived: u32,
        min: u32,
        domain: Arc<str>,
    },
    WritingDecision,
    DecisionRejected(Arc<str>),
    Binding {
        bound: u32,
        min: u32,
        rest: MissingReservations,
    },
    Bound {
        bound: u32,
        min: u32,
        completed: u32,
    },
    WaitingForSurplus {
        bound: u32,
        waiting: usize,
        rest: MissingReservations,
    },
    BelowMinimum {
        settled: u32,
        min: u32,
        why: NoRepair,
    },
    MembersLost {
        missing: u32,
        min: u32,
        bound: u32,
        completed: u32,
        kept: usize,
        restarts: bool,
        gave_to: Option<Arc<str>>,
        rest: MissingReservations,
    },
    OwnerRestarts {
        owner: OwnerRef,
        kept: usize,
        exist: u32,
    },
    Restarting {
        old: u32,
        to: Option<Arc<GangKey>>,
        blocked: Vec<Arc<str>>,
    },
    Finished {
        completed: u32,
    },
}

impl Cause {
    /// Reason and text for the Gang.
    pub(super) fn of_gang(&self) -> (Reason, String) {
        let texts = self.texts();
        (texts.reason, texts.message())
    }

    /// The same while reservations are kept until then, in seconds since 1970.
    pub(super) fn of_gang_until(&self, until: i64) -> (Reason, String) {
        let mut texts = self.texts();
        if matches!(self, Self::OwnerRestarts { .. }) {
            texts.detail = format!("reserved until {}; {}", clock(until), texts.detail);
        }
        (texts.reason, texts.message())
    }

    /// Reason and text for its pods; `others`: that other integrations name them too.
    pub(super) fn of_pods(&self, gang: &GangKey, others: Option<&str>) -> WaitReason {
        let Texts { mut reason, mut stable, .. } = self.texts();
        if matches!(self, Self::WaitingForSurplus { rest: MissingReservations::Invalid(_), .. }) {
            // They wait because of the fault, not for resources.
            reason = Reason::Invalid;
        }
        if let Some(others) = others {
            stable.push_str(&format!("; {others}"));
        }
        WaitReason::new(gang, reason, &stable)
    }

    fn texts(&self) -> Texts {
        let bound_of = |bound: u32, completed: u32| match completed {
            0 => format!("{bound} bound"),
            completed => format!("{bound} bound, {completed} succeeded"),
        };
        match self {
            Self::New => Texts::plain(Reason::UnknownSize, ""),
            Self::NotAGang { source } => Texts::plain(Reason::NotAGang, format!("source: {source}")),
            Self::UnknownSize { why, exist, uncounted } => Texts::new(
                Reason::UnknownSize,
                format!("{why}{}", uncounted.stable()),
                format!("{} {}{}", members(*exist), verb(*exist), uncounted.detail()),
            ),
            Self::WaitingForMembers { exist, min, source, unread, uncounted } => {
                let mut stable = format!("{exist} of {} {}", members(*min), verb(*min));
                if let Some(owner) = unread {
                    stable.push_str(&format!("; {owner}, which may start some pods before the others, does not exist or cannot be read"));
                }
                stable += &uncounted.stable();
                Texts::new(
                    Reason::WaitingForMembers,
                    stable,
                    format!("source: {source}{}", uncounted.detail()),
                )
            }
            Self::WaitingForMoreMembers { exist, total, min, uncounted } => {
                let (stable, detail) = match total {
                    Some(total) => (
                        format!("{exist} of {} {}", members(*total), verb(*total)),
                        format!("{min} {} enough; the gang waits briefly for the rest", are(*min)),
                    ),
                    None => (
                        format!("{exist} members of several jobs exist"),
                        "if more follow, the jobs use one name for two gangs".to_owned(),
                    ),
                };
                Texts::new(Reason::WaitingForMoreMembers, stable + &uncounted.stable(), detail)
            }
            Self::MembersWithheld { exist, min, uncounted } => {
                let reason = match uncounted.rejected {
                    Some(_) => Reason::MembersRejected,
                    None => Reason::MembersGated,
                };
                let stable = format!("{exist} of {} {}{}", members(*min), verb(*min), uncounted.stable());
                Texts::new(reason, stable, uncounted.detail().trim_start_matches("; "))
            }
            Self::WaitingForRole { role, exist, min, source, uncounted } => Texts::new(
                Reason::WaitingForRole,
                format!("{exist} of {} of role {role} {}{}", members(*min), verb(*min), uncounted.stable()),
                format!("source: {source}{}", uncounted.detail()),
            ),
            Self::Invalid(faults) => invalid(faults),
            Self::GatesStay(why) => {
                Texts::new(Reason::MissingPermission, "its scheduling gates cannot be removed", &**why)
            }
            Self::WaitingForTurn => Texts::plain(Reason::WaitingForTurn, ""),
            Self::Refused(refusal) => refusal.texts(),
            Self::Backoff(failure) => {
                Texts::new(Reason::Backoff, failure.text(), "the gang is planned again after a pause")
            }
            Self::WaitingForVictims { blocked } => Texts::plain(
                Reason::WaitingForVictims,
                format!("their devices are reserved for the gang{}", also(blocked)),
            ),
            Self::VictimsTerminating => {
                Texts::plain(Reason::VictimsTerminating, "their devices are reserved for the gang")
            }
            Self::WaitingForArrival { arrived, min, domain } => {
                let place = if domain.is_empty() { String::new() } else { format!(" in {domain}") };
                let verb = if *arrived == 1 { "has" } else { "have" };
                Texts::new(
                    Reason::WaitingForArrival,
                    format!("devices are reserved for {}{place}", members(*min)),
                    format!("{arrived} of {min} {verb} arrived"),
                )
            }
            Self::WritingDecision => Texts::plain(Reason::WritingDecision, ""),
            Self::DecisionRejected(why) => Texts::new(
                Reason::DecisionRejected,
                format!("the API server rejected the decision: {why}"),
                "it is written again",
            ),
            Self::Binding { bound, min, rest } => Texts::new(
                Reason::Binding,
                rest.after(Reason::Binding.text().to_owned()),
                format!("{bound} of {min} bound"),
            ),
            Self::Bound { bound, min, completed } => {
                Texts::plain(Reason::Bound, format!("{}, minimum {min}", bound_of(*bound, *completed)))
            }
            Self::WaitingForSurplus { bound, waiting, rest } => Texts::new(
                Reason::WaitingForSurplus,
                rest.after("the minimum is bound; more members wait".to_owned()),
                format!("{bound} bound, {waiting} waiting"),
            ),
            Self::BelowMinimum { settled, min, why } => {
                let why = match why {
                    NoRepair::OwnerFinished(owner) => format!("{owner} has ended or is gone"),
                    NoRepair::OwnerSuspended(owner) => format!("{owner} is suspended"),
                    NoRepair::Policy => "the repair policy is Ignore".to_owned(),
                };
                Texts::new(
                    Reason::BelowMinimum,
                    format!("{settled} of {} run", members(*min)),
                    format!("lost members are not replaced: {why}"),
                )
            }
            Self::MembersLost { missing, min, bound, completed, kept, restarts, gave_to, rest } => {
                let mut stable = format!("{missing} of {} {} missing", members(*min), are(*missing));
                if let Some(to) = gave_to {
                    stable.push_str(&format!("; a reservation went to {to}, of higher priority"));
                }
                let kept = match kept {
                    0 => "no reservation is kept for them".to_owned(),
                    _ if *restarts => "the gang is restarted".to_owned(),
                    1 => "1 reservation is kept for a replacement".to_owned(),
                    kept => format!("{kept} reservations are kept for replacements"),
                };
                let detail = format!("{}; {kept}", bound_of(*bound, *completed));
                Texts::new(Reason::MembersLost, rest.after(stable), detail)
            }
            Self::OwnerRestarts { owner, kept, exist } => {
                let kept = match kept {
                    1 => "1 reservation is".to_owned(),
                    kept => format!("{kept} reservations are"),
                };
                Texts::new(
                    Reason::OwnerRestarts,
                    format!("{kept} kept while {owner} creates the members again"),
                    format!("{} {}", members(*exist), verb(*exist)),
                )
            }
            Self::Restarting { old, to, blocked } => {
                let mut stable = "earlier members are being removed".to_owned();
                if let Some(to) = to {
                    stable.push_str(&format!("; the gang yields to gang {to}: both had lost members, and each held what the other lacked"));
                }
                Texts::new(Reason::Restarting, stable, format!("{old} are left{}", also(blocked)))
            }
            Self::Finished { completed } => match completed {
                0 => Texts::new(Reason::Finished, "no member is left", ""),
                completed => Texts::plain(Reason::Finished, format!("{completed} succeeded")),
            },
        }
    }
}

/// A time of day, for people: `14:05 UTC`.
pub(super) fn clock(unix: i64) -> String {
    let minutes = unix.rem_euclid(24 * 3600) / 60;
    format!("{:02}:{:02} UTC", minutes / 60, minutes % 60)
}

fn invalid(faults: &[Fault]) -> Texts {
    let first = faults.first().map(ToString::to_string).unwrap_or_default();
    let detail = match faults.len().saturating_sub(1) {
        0 => String::new(),
        1 => "1 more fault".to_owned(),
        more => format!("{more} more faults"),
    };
    Texts::new(Reason::Invalid, first, detail)
}

/// What the condition `Valid` states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Validity {
    Valid {
        source: Arc<str>,
    },
    /// Valid, with values that are lowered to the operator's ceilings.
    Lowered(Vec<Fault>),
    Invalid(Vec<Fault>),
    Unknown(Arc<str>),
    MinimumChanged {
        from: u32,
        to: u32,
        /// An object declares it, as its owner does that scales a job: nothing is wrong then.
        by_object: bool,
    },
    RepairChanged {
        from: &'static str,
        to: &'static str,
    },
    InvalidMember(String),
    /// All its members have ended.
    Ended,
}

impl Validity {
    /// Whether what the gang asks for can be followed, though perhaps later.
    pub(super) fn holds(&self) -> bool {
        match self {
            Self::Valid { .. }
            | Self::Lowered(_)
            | Self::MinimumChanged { by_object: true, .. }
            | Self::Ended => true,
            Self::MinimumChanged { .. }
            | Self::RepairChanged { .. }
            | Self::Invalid(_)
            | Self::Unknown(_)
            | Self::InvalidMember(_) => false,
        }
    }

    /// Reason and message.
    pub(super) fn state(&self) -> (Reason, String) {
        const NOT_YET: &str = "the new value holds after the next restart";
        let texts = match self {
            Self::Valid { source } => Texts::new(Reason::Valid, format!("source: {source}"), ""),
            Self::Lowered(values) => {
                let mut words = values.iter().map(ToString::to_string);
                let first = words.next().unwrap_or_default();
                Texts::new(Reason::RequestLowered, first, words.collect::<Vec<_>>().join("; "))
            }
            Self::Invalid(faults) => invalid(faults),
            Self::Unknown(why) => Texts::new(Reason::UnknownSize, &**why, ""),
            Self::MinimumChanged { from, to, .. } => Texts::new(
                Reason::MinimumChanged,
                format!("the minimum was {from} when the gang was decided and is {to} now"),
                NOT_YET,
            ),
            Self::RepairChanged { from, to } => Texts::new(
                Reason::RepairChanged,
                format!("repair was {from} when the gang was decided and is {to} now"),
                NOT_YET,
            ),
            Self::Ended => Texts::new(Reason::Valid, Reason::Finished.text(), ""),
            Self::InvalidMember(fault) => Texts::new(Reason::InvalidMember, fault.as_str(), ""),
        };
        (texts.reason, texts.message())
    }
}
