//! Finds the GPU that the operator names. Pure: nothing is guessed, and an unknown name gets the nearest ones.

use anyhow::anyhow;
use gantry_api::GpuNode;
use gantry_topology::{Gpu, GpuUuid};
use kube::ResourceExt as _;

use crate::runtime::BadInput;

/// The largest edit distance of a suggested name.
const NEAR: usize = 3;
/// GPUs that an error names.
const SHOWN: usize = 8;
/// The form of a name, for errors.
const FORM: &str = "name a GPU as NODE/INDEX such as node-1/3, as NODE/UUID, or by its UUID";

/// A GPU of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) node: String,
    pub(super) index: u8,
    pub(super) uuid: GpuUuid,
}

impl Target {
    /// The GPU at its present index: that changes when another GPU leaves the node.
    ///
    /// # Errors
    /// The node does not have the GPU any more.
    pub(super) fn located(&self, node: &GpuNode) -> anyhow::Result<Self> {
        let mut gpus = node.spec.machine.gpus().iter();
        let gpu = gpus.find(|gpu| gpu.uuid.as_ref() == Some(&self.uuid));
        let gpu = gpu.ok_or_else(|| anyhow!("{} has no GPU {} any more", self.node, self.uuid))?;
        Ok(Self { index: gpu.index, ..self.clone() })
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} GPU {} ({})", self.node, self.index, self.uuid)
    }
}

/// The GPU that `word` names.
///
/// # Errors
/// No GPU or several have that name; the operator must correct it.
pub(super) fn find(nodes: &[GpuNode], word: &str) -> Result<Target, BadInput> {
    let (named, gpu) = match word.rsplit_once('/') {
        Some((node, gpu)) => (Some(node), gpu),
        None => (None, word),
    };
    let uuid = gpu.get(..4).filter(|kind| matches!(*kind, "GPU-" | "MIG-"));
    let Some(node) = named else {
        return match uuid {
            Some(kind) => by_uuid(nodes.iter(), kind, gpu),
            None if nodes.iter().any(|node| node.name_any() == word) => {
                Err(wrong(&format!("{word} is a node; {FORM}")))
            }
            None => Err(wrong(&format!("{word:?} is no GPU; {FORM}{}", nearest_node(nodes, word)))),
        };
    };
    let Some(found) = nodes.iter().find(|known| known.name_any() == node) else {
        return Err(wrong(&format!("no node with GPUs is called {node}{}", nearest_node(nodes, node))));
    };
    if let Some(kind) = uuid {
        return by_uuid(std::iter::once(found), kind, gpu);
    }
    let gpus = found.spec.machine.gpus();
    let indices = || match gpus.len() {
        0 => format!("{node} has no GPU now"),
        1 => format!("{node} has GPU 0 only"),
        count => format!("{node} has the GPUs 0 to {}", count - 1),
    };
    let Ok(index) = gpu.parse::<u8>() else {
        return Err(wrong(&format!("{gpu:?} is neither an index nor a UUID; {}; {FORM}", indices())));
    };
    let known = gpus.iter().find(|gpu| gpu.index == index);
    let known = known.ok_or_else(|| wrong(&format!("no GPU {index}: {}", indices())))?;
    target(found, known)
}

fn by_uuid<'a>(
    nodes: impl Iterator<Item = &'a GpuNode> + Clone,
    kind: &str,
    uuid: &str,
) -> Result<Target, BadInput> {
    let all = nodes.flat_map(|node| node.spec.machine.gpus().iter().map(move |gpu| (node, gpu)));
    if kind == "MIG-" {
        let has = |gpu: &&Gpu| {
            let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
            instances.flat_map(|instance| &instance.compute).any(|device| device.uuid.as_str() == uuid)
        };
        let of = all.into_iter().find(|(_, gpu)| has(gpu));
        let hint = of.map_or_else(
            || "no GPU of the cluster has it".to_owned(),
            |(node, gpu)| format!("its GPU is {}/{}", node.name_any(), gpu.index),
        );
        return Err(wrong(&format!("{uuid} is a MIG device, and GPUs are cordoned as a whole: {hint}")));
    }
    let id = |gpu: &Gpu| gpu.uuid.as_ref().map_or_else(String::new, ToString::to_string);
    let exact: Vec<_> = all.clone().filter(|(_, gpu)| id(gpu) == uuid).collect();
    let found = match exact.is_empty() {
        true => all.clone().filter(|(_, gpu)| id(gpu).starts_with(uuid)).collect(),
        false => exact,
    };
    match found.as_slice() {
        [] => {
            let distance = |known: &String| strsim::damerau_levenshtein(known, uuid);
            let near = all.map(|(_, gpu)| id(gpu)).min_by_key(distance);
            let near = near.filter(|near| distance(near) <= NEAR);
            let hint = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
            Err(wrong(&format!("no GPU has the UUID {uuid}{hint}")))
        }
        [(node, gpu)] => target(node, gpu),
        several => {
            let names = several.iter().take(SHOWN);
            let names: Vec<String> =
                names.map(|(node, gpu)| format!("{}/{}", node.name_any(), gpu.index)).collect();
            let more = several.len().saturating_sub(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            Err(wrong(&format!(
                "{} GPUs have {uuid}: {}{more}; name one of them",
                several.len(),
                names.join(", ")
            )))
        }
    }
}

/// A GPU of a node.
///
/// # Errors
/// Its UUID is unknown.
pub(super) fn target(node: &GpuNode, gpu: &Gpu) -> Result<Target, BadInput> {
    let node = node.name_any();
    let uuid = gpu.uuid.clone().ok_or_else(|| {
        wrong(&format!(
            "GPU {} of {node} has no known UUID: it could not be reached since the plugin started, and is not given out",
            gpu.index
        ))
    })?;
    Ok(Target { node, index: gpu.index, uuid })
}

fn nearest_node(nodes: &[GpuNode], name: &str) -> String {
    let distance = |known: &String| strsim::damerau_levenshtein(known, name);
    let near = nodes.iter().map(kube::ResourceExt::name_any).min_by_key(distance);
    near.filter(|near| distance(near) <= NEAR)
        .map_or_else(String::new, |near| format!("; did you mean {near}?"))
}

fn wrong(text: &str) -> BadInput {
    BadInput(anyhow!("{text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, uuids: &[&str]) -> GpuNode {
        let machine = include_str!("../../../simulator/machines/l4-4x-pcie.yaml");
        let mut machine: serde_json::Value = serde_saphyr::from_str(machine).unwrap();
        for (gpu, uuid) in machine["gpus"].as_array_mut().unwrap().iter_mut().zip(uuids) {
            gpu["uuid"] = (*uuid).into();
        }
        serde_json::from_value(serde_json::json!({
            "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name},
            "spec": {"machine": machine},
        }))
        .unwrap()
    }

    fn found(word: &str) -> Result<String, String> {
        let nodes = [
            node("node-1", &["GPU-aaaa1", "GPU-aaaa2", "GPU-b", "GPU-eeee"]),
            node("node-2", &["GPU-cccc1", "GPU-cccc2", "GPU-d", "GPU-eeee"]),
        ];
        find(&nodes, word).map(|target| target.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn gpu_is_found_by_index_uuid_and_beginning() {
        for word in ["node-1/1", "node-1/GPU-aaaa2", "GPU-aaaa2"] {
            assert_eq!(found(word), Ok("node-1 GPU 1 (GPU-aaaa2)".to_owned()), "{word}");
        }
        assert_eq!(found("GPU-d"), Ok("node-2 GPU 2 (GPU-d)".to_owned()));
        assert_eq!(found("node-2/GPU-eeee"), Ok("node-2 GPU 3 (GPU-eeee)".to_owned()));
        assert_eq!(
            found("node-1/GPU-aa").unwrap_err(),
            "2 GPUs have GPU-aa: node-1/0, node-1/1; name one of them"
        );
        assert_eq!(found("GPU-cccc1"), Ok("node-2 GPU 0 (GPU-cccc1)".to_owned()));
    }

    #[test]
    fn gpu_keeps_its_uuid_and_not_its_index() {
        let target = find(&[node("node-1", &["GPU-a", "GPU-b", "GPU-c", "GPU-d"])], "node-1/1").unwrap();
        let after = node("node-1", &["GPU-b", "GPU-c", "GPU-d", "GPU-e"]);
        assert_eq!(target.located(&after).unwrap().to_string(), "node-1 GPU 0 (GPU-b)");
        let error = target.located(&node("node-1", &["GPU-a", "GPU-c", "GPU-d", "GPU-e"])).unwrap_err();
        assert_eq!(error.to_string(), "node-1 has no GPU GPU-b any more");
    }

    #[test]
    fn wrong_name_gets_the_nearest() {
        for (word, error) in [
            ("node-3/0", "no node with GPUs is called node-3; did you mean node-1?"),
            ("elsewhere/0", "no node with GPUs is called elsewhere"),
            ("node-1/4", "no GPU 4: node-1 has the GPUs 0 to 3"),
            (
                "node-1/999",
                "\"999\" is neither an index nor a UUID; node-1 has the GPUs 0 to 3; name a GPU as \
              NODE/INDEX such as node-1/3, as NODE/UUID, or by its UUID",
            ),
            (
                "node-1",
                "node-1 is a node; name a GPU as NODE/INDEX such as node-1/3, as NODE/UUID, or by its UUID",
            ),
            ("3", "\"3\" is no GPU; name a GPU as NODE/INDEX such as node-1/3, as NODE/UUID, or by its UUID"),
            ("GPU-cccx1", "no GPU has the UUID GPU-cccx1; did you mean GPU-cccc1?"),
            ("GPU-eeee", "2 GPUs have GPU-eeee: node-1/3, node-2/3; name one of them"),
            (
                "MIG-x",
                "MIG-x is a MIG device, and GPUs are cordoned as a whole: no GPU of the cluster has it",
            ),
            ("", "\"\" is no GPU; name a GPU as NODE/INDEX such as node-1/3, as NODE/UUID, or by its UUID"),
        ] {
            assert_eq!(found(word), Err(error.to_owned()), "{word}");
        }
    }
}
