//! A cluster for plans: nodes of eight GPUs in racks and zones, as values.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::{DeviceId, NodeName, PodUid};
use gantry_gang::protocol::{MemberRequest, Placement, PlanRequest, Refusal, ShapeId, Shortage, Sibling};
use gantry_gang::terms::{Authority, Rails};
use gantry_gang::{
    Fabric, GangKey, Integration, Level, Levels, Needs, NodeFacts, Repair, Resources, Terms, TopologyRequest,
};

use crate::devices::DeviceSet;
use crate::fixtures::{GPU, class_of, kind, pool_of, request, switched};
use crate::input::{EFFORT, ExactNode, NodeResources, PlacementRules, PlanInput, Shape};
use crate::kind::Kind;
use crate::plan::{Diagnosis, explain, plan};
use crate::request::Request;
use crate::snapshot::{Class, ClassIx, NodeIx, NodeState, Snapshot};

pub(crate) struct World {
    pub(crate) snapshot: Snapshot,
    pub(crate) rooms: Vec<NodeResources>,
    pub(crate) shapes: Vec<Shape>,
    levels: Levels,
    ids: Vec<Vec<Option<DeviceId>>>,
    kind: Arc<Kind>,
}

impl World {
    /// Without nodes; fabric of zones and racks.
    pub(crate) fn new() -> Self {
        Self::of(&switched())
    }

    /// The same of another machine.
    pub(crate) fn of(machine: &gantry_topology::Machine) -> Self {
        let level = |name: &str| Level { name: name.into(), label: format!("example.com/{name}").into() };
        Self {
            snapshot: Snapshot { synced: true, ..Snapshot::default() },
            rooms: Vec::new(),
            shapes: Vec::new(),
            levels: Levels(vec![level("zone"), level("rack")]),
            ids: Vec::new(),
            kind: kind(machine),
        }
    }

    /// A node at `zone/rack` with some of its GPUs free.
    pub(crate) fn node(&mut self, at: &str, name: &str, free: &str) -> &mut Self {
        let free: DeviceSet =
            free.split(',').filter(|gpu| !gpu.is_empty()).map(|gpu| gpu.parse::<usize>().unwrap()).collect();
        self.node_with(at, name, &free, 0)
    }

    /// The same, some GPUs sick: those that are not free come first.
    pub(crate) fn node_with(
        &mut self,
        at: &str,
        name: &str,
        free: &DeviceSet,
        unhealthy: usize,
    ) -> &mut Self {
        self.node_of(at, name, |class| {
            let pool = &mut class.pools[0];
            (pool.free, pool.open, pool.unhealthy) = (free.clone(), free.clone(), unhealthy);
        })
    }

    /// A node with a changed class: at first every GPU is free.
    pub(crate) fn node_of(&mut self, at: &str, name: &str, change: impl FnOnce(&mut Class)) -> &mut Self {
        let gpus = self.kind.gpus();
        let free = DeviceSet::range(0, gpus);
        let mut class = class_of(&self.kind, pool_of(GPU, crate::shape::Shape::Whole, gpus, free));
        change(&mut class);
        let class = NodeState::Ours(class);
        let classes = Arc::make_mut(&mut self.snapshot.classes);
        let known = classes.iter().position(|known| **known == class);
        let number = known.unwrap_or_else(|| {
            classes.push(Arc::new(class));
            classes.len() - 1
        });
        Arc::make_mut(&mut self.snapshot.names).number(&NodeName::from(name));
        self.snapshot.nodes.push(ClassIx(u32::try_from(number).unwrap()));
        let (zone, rack) = at.split_once('/').unwrap_or((at, ""));
        let mut labels: BTreeMap<Arc<str>, Arc<str>> = BTreeMap::new();
        labels.insert("kubernetes.io/hostname".into(), name.into());
        for (level, value) in [("zone", zone), ("rack", rack)] {
            if !value.is_empty() {
                labels.insert(format!("example.com/{level}").into(), value.into());
            }
        }
        let allocatable = Resources {
            milli_cpu: 64_000,
            memory: 512 << 30,
            ephemeral: 100 << 30,
            pods: 110,
            ..Resources::default()
        };
        self.rooms.push(NodeResources {
            facts: Some(Arc::new(NodeFacts {
                name: name.into(),
                labels,
                allocatable: allocatable.clone(),
                ..NodeFacts::default()
            })),
            left: allocatable,
        });
        self.ids.push((0..gpus).map(|gpu| Some(format!("GPU-{name}-{gpu}").as_str().into())).collect());
        self
    }

    /// Changes what a node says of itself and has left.
    pub(crate) fn room(
        &mut self,
        name: &str,
        change: impl FnOnce(&mut NodeFacts, &mut Resources),
    ) -> &mut Self {
        let node = self.snapshot.find(name).unwrap();
        let room = &mut self.rooms[node.0 as usize];
        change(Arc::make_mut(room.facts.as_mut().unwrap()), &mut room.left);
        self
    }

    /// Members that ask for so many GPUs and nothing else than a pod's place.
    pub(crate) fn shape(&mut self, gpus: u32) -> ShapeId {
        let needs = Needs {
            resources: Resources { pods: 1, ..Resources::default() },
            namespace: "ml".into(),
            ..Needs::default()
        };
        self.shape_of(gpus, needs)
    }

    pub(crate) fn shape_of(&mut self, gpus: u32, needs: Needs) -> ShapeId {
        self.shapes.push(Shape { request: request(gpus), needs: Arc::new(needs) });
        ShapeId(u32::try_from(self.shapes.len() - 1).unwrap())
    }

    /// Members with this request.
    pub(crate) fn asking(&mut self, request: Arc<Request>) -> ShapeId {
        let shape = self.shape(0);
        self.shapes[shape.0 as usize].request = request;
        shape
    }

    pub(crate) fn fabric(&self) -> Fabric {
        Fabric::build(self.levels.clone(), self.rooms.iter().map(|room| room.facts.as_deref()))
    }

    pub(crate) fn with<T>(&self, then: impl FnOnce(&PlanInput<'_>) -> T) -> T {
        self.with_barred(&|_| PlacementRules::default(), then)
    }

    pub(crate) fn with_barred<T>(
        &self,
        barred: &dyn Fn(&Shape) -> PlacementRules,
        then: impl FnOnce(&PlanInput<'_>) -> T,
    ) -> T {
        self.with_rules(&|shape, _| barred(shape), then)
    }

    /// The same with rules that depend on the pods that count as gone.
    pub(crate) fn with_rules<T>(
        &self,
        rules: &dyn Fn(&Shape, &[&PodUid]) -> PlacementRules,
        then: impl FnOnce(&PlanInput<'_>) -> T,
    ) -> T {
        let fabric = self.fabric();
        let exact = |node: NodeIx| match self.snapshot.node_state(node) {
            NodeState::Ours(class) => {
                let ids = vec![self.ids[node.0 as usize].as_slice(); class.pools.len()];
                Some(ExactNode { class: class.clone(), ids })
            }
            _ => None,
        };
        then(&PlanInput {
            snapshot: &self.snapshot,
            rooms: &self.rooms,
            fabric: &fabric,
            shapes: &self.shapes,
            barred: rules,
            gone: &[],
            exact: &exact,
            effort: &Cell::new(EFFORT),
        })
    }

    pub(crate) fn plan(&self, wanted: &PlanRequest) -> Result<Placement, Refusal> {
        self.with(|input| plan(input, wanted))
    }

    pub(crate) fn explain(&self, wanted: &PlanRequest) -> Diagnosis {
        self.with(|input| explain(input, wanted))
    }

    /// What is missing for a gang that does not fit.
    pub(crate) fn shortage(&self, wanted: &PlanRequest) -> Shortage {
        match self.plan(wanted) {
            Err(Refusal::DoesNotFit(shortage)) => *shortage,
            other => panic!("{other:?}"),
        }
    }

    /// The plan as a line: domain, then nodes with the members' GPUs in the order of ranks; or the reason of the refusal.
    pub(crate) fn line(&self, wanted: &PlanRequest) -> String {
        match self.plan(wanted) {
            Ok(placement) => line(&placement),
            Err(refused) => refused.reason().to_string(),
        }
    }

    /// The nodes of the plan, whose names are letters, in the order of ranks.
    pub(crate) fn nodes(&self, wanted: &PlanRequest) -> String {
        let placement = self.plan(wanted).unwrap();
        let nodes = placement.places.iter().map(|place| place.node.as_str());
        nodes.collect()
    }
}

/// `rack r1: a[0,1 2,3] b[0,1]`.
pub(crate) fn line(placement: &Placement) -> String {
    let mut text = format!("{}:", placement.domain);
    let mut last = None;
    for place in &placement.places {
        let gpus: Vec<&str> =
            place.devices[0].1.iter().map(|id| id.as_str().rsplit('-').next().unwrap()).collect();
        if last == Some(&place.node) {
            text.pop();
            text.push(' ');
        } else {
            text.push_str(&format!(" {}[", place.node));
        }
        text.push_str(&gpus.join(","));
        text.push(']');
        last = Some(&place.node);
    }
    text
}

/// A gang of so many members of each shape, one after the other, with ranks. All must be placed.
pub(crate) fn gang(members: &[(u32, ShapeId)]) -> PlanRequest {
    let shapes = members.iter().flat_map(|(count, shape)| (0..*count).map(move |_| *shape));
    let members: Vec<MemberRequest> = (0u32..)
        .zip(shapes)
        .map(|(rank, shape)| MemberRequest {
            uid: format!("uid-{rank}").as_str().into(),
            shape,
            rank: Some(rank),
            role: "".into(),
        })
        .collect();
    let must = u32::try_from(members.len()).unwrap();
    PlanRequest {
        gang: Arc::new(GangKey {
            namespace: "ml".into(),
            name: "train".into(),
            integration: Integration::Annotation,
            incarnation: "".into(),
        }),
        terms: Arc::new(Terms {
            min: must,
            singles: false,
            max: must,
            total: None,
            by_role: Vec::new(),
            quorum: None,
            level: None,
            slice: None,
            rails: Rails::Same,
            spares: 0,
            repair: Repair::Hold,
            repair_by: Authority::Pods,
            arrival: std::time::Duration::from_secs(60),
            restart_hold: std::time::Duration::ZERO,
            checkpointed: false,
            lowered: Vec::new(),
            unread: None,
            authority: Authority::Pods,
            decided_by: "a test".into(),
        }),
        members,
        must,
        placed: Vec::new(),
        spares: Vec::new(),
        without: Vec::new(),
        priority: 0,
        completes: false,
        resumes: false,
        others: Vec::new(),
    }
}

/// A member that has a place already.
pub(crate) fn sibling(node: &str, rank: u32) -> Sibling {
    Sibling { node: node.into(), shape: None, rank: Some(rank), ordinal: None, devices: Vec::new() }
}

pub(crate) fn terms(wanted: &mut PlanRequest, change: impl FnOnce(&mut Terms)) {
    change(Arc::make_mut(&mut wanted.terms));
}

/// With a level of the fabric.
pub(crate) fn level(wanted: &mut PlanRequest, level: &str, required: bool) {
    terms(wanted, |terms| {
        terms.level = Some(TopologyRequest { level: level.into(), required });
    });
}
