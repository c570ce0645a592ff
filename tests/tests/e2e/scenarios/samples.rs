//! The objects of `docs/` and `manifests/samples/`, as a reader applies them: the API server accepts each of a kind that
//! it knows, without unknown or repeated fields. It knows Kubernetes' own kinds, Gantry's, those of the controllers of
//! `tests/components/controllers`, and KEDA's.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use gantry_e2e::gantry::manifests;
use gantry_e2e::pages;
use serde_json::Value;

use crate::bed::Bed;

const NAMESPACE: &str = "e2e-samples";

/// Kinds whose definitions are not installed here.
const UNKNOWN: [&str; 6] = [
    "batch.volcano.sh/Job",
    "kind.x-k8s.io/Cluster",
    "kubeflow.org/MPIJob",
    "ray.io/RayCluster",
    "serving.kserve.io/InferenceService",
    "trainer.kubeflow.org/TrainJob",
];

/// An object and its place.
struct Sample {
    place: String,
    object: Value,
}

impl Sample {
    /// Group and kind.
    fn kind(&self) -> String {
        let version = self.object["apiVersion"].as_str().unwrap_or_default();
        let group = version.rsplit_once('/').map_or("", |(group, _)| group);
        format!("{group}/{}", self.object["kind"].as_str().unwrap_or_default())
    }
}

pub(super) async fn documented_objects_are_accepted(bed: &Bed) -> Result<()> {
    bed.namespace(NAMESPACE).await?;
    bed.cluster().install_controllers().await?;
    bed.cluster().install_keda_resources().await?;
    let mut accepted = 0;
    let mut unknown = BTreeSet::new();
    let mut refused = Vec::new();
    for mut sample in samples()? {
        let kind = sample.kind();
        if UNKNOWN.contains(&kind.as_str()) {
            unknown.insert(kind);
            continue;
        }
        // The namespace of a sample need not exist.
        if let Some(namespace) = sample.object["metadata"].get_mut("namespace") {
            *namespace = NAMESPACE.into();
        }
        let args = ["-n", NAMESPACE, "apply", "--dry-run=server", "--validate=strict", "-f", "-"];
        match bed.cluster().kubectl_with_input(&args, &sample.object.to_string()).await {
            Ok(_) => accepted += 1,
            Err(error) => refused.push(format!("{} ({kind}): {error}", sample.place)),
        }
    }
    ensure!(refused.is_empty(), "refused:\n{}", refused.join("\n"));
    ensure!(accepted > 15, "only {accepted} objects were found");
    let obsolete: Vec<&str> = UNKNOWN.into_iter().filter(|kind| !unknown.contains(*kind)).collect();
    ensure!(obsolete.is_empty(), "no sample is of the kinds {obsolete:?}");
    Ok(())
}

/// All objects of the pages and of the files beside them.
fn samples() -> Result<Vec<Sample>> {
    let project = manifests().join("..");
    let mut found = Vec::new();
    let folders = [project.join("docs"), manifests().join("samples")];
    for path in folders.iter().map(|folder| pages::files(folder)).collect::<Result<Vec<_>, _>>()?.concat() {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let name = path.strip_prefix(&project).unwrap_or(&path).display().to_string();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("yaml") => found.extend(objects(&name, &text)?),
            Some("md") => {
                for block in pages::blocks(&text).iter().filter(|block| block.language == "yaml") {
                    found.extend(objects(&format!("{name}:{}", block.line), &block.text)?);
                }
            }
            _ => {}
        }
    }
    Ok(found)
}

/// The documents of a text that are objects of Kubernetes; a part of one is not.
fn objects(place: &str, text: &str) -> Result<Vec<Sample>> {
    if !text.lines().any(|line| line.starts_with("apiVersion:")) {
        return Ok(Vec::new());
    }
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).with_context(|| place.to_owned())?;
    let whole = documents.into_iter().filter(|object| object["kind"].is_string());
    Ok(whole.map(|object| Sample { place: place.to_owned(), object }).collect())
}
