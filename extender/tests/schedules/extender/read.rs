//! Objects of the API server read as the extender reads them. What many processes read alike is read once.

use super::*;

thread_local! {
    static READERS: RefCell<Readers> = RefCell::new(Readers {
        pods: Reader::new(watched()),
        kinds: Kinds::default(),
        nodes: HashMap::new(),
        inventories: HashMap::new(),
    });
}

/// A node: what it advertises, and what else is known of it.
type Node = (Vec<(ResourceName, u32)>, Arc<NodeFacts>);

struct Readers {
    pods: Reader,
    kinds: Kinds,
    nodes: HashMap<(String, u32), Node>,
    inventories: HashMap<String, Inventory>,
}

pub(crate) fn read_pod(text: &str) -> PodFacts {
    let pod = serde_json::from_str(text).unwrap();
    match READERS.with_borrow_mut(|readers| readers.pods.read(pod)) {
        Some(ParsedPod::Facts(facts)) => *facts,
        other => panic!("{other:?}"),
    }
}

/// What is published of a node is mostly what was published of one before.
const INVENTORIES: usize = 4096;

pub(crate) fn read_gpu_node(text: &str) -> Inventory {
    READERS.with_borrow_mut(|readers| {
        if let Some(known) = readers.inventories.get(text) {
            return known.clone();
        }
        let node = serde_json::from_str(text).unwrap();
        let inventory = index::inventory(&watched(), node, &mut readers.kinds).unwrap();
        if readers.inventories.len() >= INVENTORIES {
            readers.inventories.clear();
        }
        readers.inventories.insert(text.to_owned(), inventory.clone());
        inventory
    })
}

pub(super) fn read_node(name: &str, gpus: u32) -> Node {
    READERS.with_borrow_mut(|readers| {
        let node = readers.nodes.entry((name.to_owned(), gpus)).or_insert_with(|| {
            let count = gpus.to_string();
            let node = json!({"metadata": {"name": name}, "status": {"allocatable":
                {"nvidia.com/gpu": count, "cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "100Gi"}}});
            let node = serde_json::from_value(node).unwrap();
            let facts = index::described(&watched(), &node, &mut TextInterner::default());
            (index::advertised(&watched(), &node), Arc::new(facts))
        });
        node.clone()
    })
}
