//! Sets and removes the annotation that cordons a GPU.

use anyhow::{Context as _, anyhow};
use gantry_api::{Cordon, Cordons, GpuNode};
use gantry_extender::eviction::reported_holders;
use gantry_extender::gpu_node::{self, Changes};
use gantry_runtime::chain;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};

use super::TIMEOUT;
use super::target::{self, Target};
use super::{CordonArgs, CordonCommand, UncordonArgs, UncordonCommand};
use crate::cluster::ClusterArgs;
use crate::map::list;
use crate::runtime::print;
use crate::visible::Visible;

/// Runs `gantry cordon`.
///
/// # Errors
/// The cluster cannot be read or written, or has no such GPU.
pub(crate) async fn cordon(args: CordonArgs) -> anyhow::Result<()> {
    let CordonCommand::Gpu { targets, reason } = args.what;
    let (client, nodes, found) = read(&targets.cluster, &targets.gpus).await?;
    let cordon = Cordon { reason, by: user(&client).await, since: Some(Timestamp::now()) };
    let mut out = String::new();
    for target in found {
        let line = match set(&client, &target, Some(&cordon)).await? {
            Some(known) => {
                let since = known.since.map_or_else(String::new, |since| format!(", since {since:.0}"));
                format!("{target} is already {known}{since}")
            }
            None => format!("{target} {cordon}{}", held(&nodes, &target)),
        };
        out.push_str(&line);
        out.push('\n');
    }
    print(&Visible::new(&out))
}

/// Runs `gantry uncordon`.
///
/// # Errors
/// The cluster cannot be read or written, or has no such GPU.
pub(crate) async fn uncordon(args: UncordonArgs) -> anyhow::Result<()> {
    let UncordonCommand::Gpu(targets) = args.what;
    let (client, _, found) = read(&targets.cluster, &targets.gpus).await?;
    let mut out = String::new();
    for target in found {
        let line = match set(&client, &target, None).await? {
            Some(known) => format!("{target} uncordoned; it was {known}"),
            None => format!("{target} is not cordoned"),
        };
        out.push_str(&line);
        out.push('\n');
    }
    print(&Visible::new(&out))
}

/// The GPUs that the operator names: all of them, or an error.
pub(super) async fn read(
    cluster: &ClusterArgs,
    words: &[String],
) -> anyhow::Result<(Client, Vec<GpuNode>, Vec<Target>)> {
    let client = cluster.connect().await?;
    let nodes = list(Api::<GpuNode>::all(client.clone()), "GpuNodes").await?;
    let found: Vec<Target> = words.iter().map(|word| target::find(&nodes, word)).collect::<Result<_, _>>()?;
    Ok((client, nodes, found))
}

/// The name of the user, as the API server knows it.
pub(super) async fn user(client: &Client) -> Option<String> {
    let api = Api::<SelfSubjectReview>::all(client.clone());
    let (ask, params) = (SelfSubjectReview::default(), PostParams::default());
    let review = tokio::time::timeout(TIMEOUT, api.create(&params, &ask)).await.ok()?.ok()?;
    review.status?.user_info?.username
}

/// Cordons a GPU unless it is cordoned, or uncordons it. Returns the cordon that was there before.
pub(super) async fn set(
    client: &Client,
    target: &Target,
    wanted: Option<&Cordon>,
) -> anyhow::Result<Option<Cordon>> {
    change(client, target, |known| {
        let differs = known.is_some() != wanted.is_some();
        (differs.then(|| wanted.map(Cordon::written)), known.cloned())
    })
    .await
}

/// Uncordons a GPU that this rule of remediation cordoned. Returns the cordon of another client, which stays.
pub(super) async fn lift_of_rule(
    client: &Client,
    target: &Target,
    rule: &str,
) -> anyhow::Result<Option<Cordon>> {
    change(client, target, |known| match known {
        Some(known) if known.is_of_rule(rule) => (Some(None), None),
        known => (None, known.cloned()),
    })
    .await
}

/// Changes the annotation that cordons a GPU by the cordon that is there: to a value, or away.
async fn change<T>(
    client: &Client,
    target: &Target,
    mut decide: impl FnMut(Option<&Cordon>) -> (Option<Option<String>>, T),
) -> anyhow::Result<T> {
    let written = gpu_node::annotate(client, &target.node, |annotations| {
        let cordons = Cordons::of(Some(annotations));
        let (value, result) = decide(cordons.get(&target.uuid));
        (
            value.map(|value| (Cordon::annotation(&target.uuid), value)).into_iter().collect::<Changes>(),
            result,
        )
    });
    let written = tokio::time::timeout(TIMEOUT, written).await;
    let written =
        written.with_context(|| format!("the API server does not respond within {} s", TIMEOUT.as_secs()))?;
    written.map_err(|error| match &error {
        kube::Error::Api(status) if status.code == 404 => {
            anyhow!("the GpuNode {} is gone; nothing was changed", target.node)
        }
        kube::Error::Api(status) if status.code == 403 => anyhow!(
            "you may not change the GpuNode {}: {}; the ClusterRole gantry-operator has the right",
            target.node,
            status.message
        ),
        error => anyhow!("the GpuNode {} cannot be changed: {}", target.node, chain(error)),
    })
}

/// The pods that hold a GPU, as the end of a sentence.
fn held(nodes: &[GpuNode], target: &Target) -> String {
    let node = nodes.iter().find(|node| node.metadata.name.as_deref() == Some(&*target.node));
    let pods = node.map(|node| reported_holders(node, &target.uuid)).unwrap_or_default();
    let names: Vec<String> = pods.into_iter().map(|(namespace, pod)| format!("{namespace}/{pod}")).collect();
    match names.len() {
        0 => String::new(),
        1 => format!("; {} holds it and goes on", names[0]),
        _ => format!("; {} hold it and go on", names.join(", ")),
    }
}
