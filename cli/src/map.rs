//! `gantry map`: the GPUs of the cluster, their links and their holders, as text, JSON or a picture. Reads GpuNodes and
//! Gangs; writes nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::{Args, ValueEnum};
use gantry_api::{Gang, GpuNode};
use gantry_extender::args::levels;
use gantry_gang::Levels;
use gantry_map::{ClusterMap, Letters, Page};
use gantry_runtime::chain;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt as _};

use crate::cluster::ClusterArgs;
use crate::runtime::{BadInput, print};
use crate::screen::Screen;
use crate::visible::Visible;

/// Options of `gantry map`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
JSON (-o json), stable fields: nodes[] (name, domain, model, links, notReady, freeGpus, gpus[]); gpus[] by index (state:
free, held, partlyHeld, reserved, leaving or unhealthy; devices; pods[] of namespace, name, gang, devices, hold;
unhealthy; reservedFor).

Examples:
  gantry map                                   every node; alike nodes are one line
  gantry map --fabric zone,rack=example.com/rack
                                               by zone and rack
  gantry map --free                            only nodes with free GPUs
  gantry map --gang research/train             only the nodes of a gang
  gantry map -o svg > map.svg                  a picture for a browser

Exit codes: 0 drawn, 1 the cluster cannot be read, 2 no such node or gang.")]
pub(crate) struct MapArgs {
    #[command(flatten)]
    cluster: ClusterArgs,

    /// Only this node
    #[arg(long, value_name = "NAME")]
    node: Option<String>,

    /// Only nodes with pods or reservations of this gang or pod
    #[arg(long, value_name = "[NAMESPACE/]NAME")]
    gang: Option<String>,

    /// Only nodes with free GPUs
    #[arg(long)]
    free: bool,

    /// The levels of the fabric by which nodes are grouped: the extender's --fabric
    #[arg(long, env = "GANTRY_FABRIC", value_name = "LEVELS", default_value = "", value_parser = levels)]
    fabric: Levels,

    /// Output format
    #[arg(long, short, value_enum, value_name = "FORMAT", default_value_t)]
    output: Output,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Output {
    /// Lines for a terminal
    #[default]
    Text,
    /// JSON
    Json,
    /// An SVG picture
    Svg,
}

/// Objects of one request: a GpuNode with many devices is large.
const LIST: u32 = 50;
/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The largest edit distance of a suggested name.
const NEAR: usize = 3;

/// Runs `gantry map`.
///
/// # Errors
/// The cluster cannot be read, or has no such node or gang.
pub(crate) async fn run(args: MapArgs) -> anyhow::Result<()> {
    let map = read(args.cluster.connect().await?, &args.fabric).await?;
    print(&output(&args, &filtered(&args, map)?)?)
}

fn output(args: &MapArgs, map: &ClusterMap) -> anyhow::Result<Visible> {
    Ok(match args.output {
        Output::Json => {
            let mut text = serde_json::to_string_pretty(map).context("writing JSON")?;
            text.push('\n');
            Visible::new(&text)
        }
        Output::Svg => Visible::new(&gantry_map::svg(map)),
        Output::Text => {
            let mut letters = Letters::default();
            letters.learn(map);
            let page = page();
            let text = gantry_map::text(map, &letters, page);
            if page.color { Visible::colored(&text) } else { Visible::new(&text) }
        }
    })
}

/// Standard output as a page.
fn page() -> Page {
    let terminal = terminal_size::terminal_size().map_or(100, |(width, _)| width.0.into());
    let Screen { columns, color } = Screen::of_stdout(terminal);
    Page { columns: columns.clamp(40, 400), color }
}

/// Reads the map of the cluster.
async fn read(client: Client, fabric: &Levels) -> anyhow::Result<ClusterMap> {
    let gpu_nodes = list(Api::<GpuNode>::all(client.clone()), "GpuNodes").await?;
    let gangs = list(Api::<Gang>::all(client.clone()), "Gangs").await?;
    let domains = if fabric.0.is_empty() { BTreeMap::new() } else { domains(client, fabric).await? };
    Ok(ClusterMap::of(&gpu_nodes, &gangs, |node| domains.get(node).cloned().unwrap_or_default()))
}

/// All objects of a kind, a few per request.
async fn list<K>(api: Api<K>, kind: &str) -> anyhow::Result<Vec<K>>
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    pages(async |params| api.list(&params).await, kind).await
}

/// All items of a list.
async fn pages<K: Clone>(
    get: impl AsyncFn(ListParams) -> kube::Result<kube::core::ObjectList<K>>,
    kind: &str,
) -> anyhow::Result<Vec<K>> {
    let mut all = Vec::new();
    let mut params = ListParams::default().limit(LIST);
    loop {
        let answer = tokio::time::timeout(TIMEOUT, get(params.clone())).await;
        let answer =
            answer.with_context(|| format!("{kind} cannot be listed within {} s", TIMEOUT.as_secs()))?;
        let page = answer.map_err(|error| match &error {
            kube::Error::Api(status) if status.code == 404 => {
                anyhow!("the cluster has no {kind}: is Gantry installed there?")
            }
            error => anyhow!("{kind} cannot be listed: {}", chain(error)),
        })?;
        all.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(all),
        }
    }
}

/// The part of the fabric of each node, such as `zone a / rack r1`.
async fn domains(client: Client, fabric: &Levels) -> anyhow::Result<BTreeMap<String, String>> {
    let api = Api::<Node>::all(client);
    let nodes: Vec<PartialObjectMeta<Node>> =
        pages(async |params| api.list_metadata(&params).await, "nodes").await?;
    let domain = |node: &PartialObjectMeta<Node>| {
        let parts = fabric.0.iter().map(|level| {
            let value = node.labels().get(&*level.label).map_or("(no label)", String::as_str);
            format!("{} {value}", level.name)
        });
        parts.collect::<Vec<_>>().join(" / ")
    };
    Ok(nodes.iter().map(|node| (node.name_any(), domain(node))).collect())
}

/// The nodes that the options select.
fn filtered(args: &MapArgs, mut map: ClusterMap) -> anyhow::Result<ClusterMap> {
    if let Some(name) = &args.node {
        if map.node(name).is_none() {
            let names = map.nodes.iter().map(|node| node.name.as_str());
            return Err(unknown("node with GPUs", name, names));
        }
        map.nodes.retain(|node| node.name == *name);
    }
    if let Some(name) = &args.gang {
        let holders: Vec<String> = map.nodes.iter().flat_map(gantry_map::all_holders).collect();
        let wanted = |holder: &str| {
            let bare = holder.split_once('/').map_or(holder, |(_, bare)| bare);
            holder == name || bare == name
        };
        if !holders.iter().any(|holder| wanted(holder)) {
            return Err(unknown("gang or pod that holds GPUs", name, holders.iter().map(String::as_str)));
        }
        map.nodes.retain(|node| gantry_map::all_holders(node).iter().any(|holder| wanted(holder)));
    }
    if args.free {
        map.nodes.retain(|node| node.free_gpus > 0);
    }
    Ok(map)
}

fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> anyhow::Error {
    let distance = |known: &&str| {
        let bare = known.split_once('/').map_or(*known, |(_, bare)| bare);
        strsim::damerau_levenshtein(known, name).min(strsim::damerau_levenshtein(bare, name))
    };
    let near = known.min_by_key(distance).filter(|near| distance(near) <= NEAR);
    let hint = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
    BadInput(anyhow!("no {what} is called {name}{hint}")).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &[&str]) -> MapArgs {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            map: MapArgs,
        }
        let line = [&["map"], words].concat();
        <Line as clap::Parser>::try_parse_from(line).unwrap().map
    }

    fn cluster() -> ClusterMap {
        let node = |name: &str, pod: Option<&str>| {
            let machine = include_str!("../../simulator/machines/dgx1-v100.yaml");
            let machine: gantry_topology::Machine = serde_saphyr::from_str(machine).unwrap();
            let uuids = machine.gpus().iter().filter_map(|gpu| gpu.uuid.as_ref()).map(|uuid| uuid.as_str());
            let uuids: Vec<&str> = uuids.collect();
            let holders = pod.map(|pod| {
                serde_json::json!({"namespace": "research", "pod": pod, "resource": "nvidia.com/gpu",
                    "devices": uuids, "provenance": "PodResources"})
            });
            let holders: Vec<_> = holders.into_iter().collect();
            serde_json::from_value(serde_json::json!({
                "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name},
                "spec": {"machine": machine}, "status": {"holders": holders},
            }))
            .unwrap()
        };
        ClusterMap::of(&[node("a", None), node("b", Some("train"))], &[], |_| String::new())
    }

    fn names(words: &[&str]) -> Result<Vec<String>, String> {
        let map = filtered(&args(words), cluster()).map_err(|error| error.to_string())?;
        Ok(map.nodes.into_iter().map(|node| node.name).collect())
    }

    #[test]
    fn options_select_nodes() {
        let list = |names: &[&str]| Ok(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(names(&[]), list(&["a", "b"]));
        assert_eq!(names(&["--node", "b"]), list(&["b"]));
        assert_eq!(names(&["--free"]), list(&["a"]));
        assert_eq!(names(&["--gang", "train"]), list(&["b"]));
        assert_eq!(names(&["--gang", "research/train"]), list(&["b"]));
    }

    #[test]
    fn unknown_names_get_the_nearest() {
        let no = |text: &str| Err(text.to_owned());
        assert_eq!(names(&["--node", "bb"]), no("no node with GPUs is called bb; did you mean b?"));
        assert_eq!(
            names(&["--gang", "trian"]),
            no("no gang or pod that holds GPUs is called trian; did you mean research/train?")
        );
        assert_eq!(
            names(&["--gang", "something-else"]),
            no("no gang or pod that holds GPUs is called something-else")
        );
    }

    #[test]
    fn json_has_the_fields_of_the_help() {
        let args = args(&["-o", "json", "--node", "b"]);
        let output = output(&args, &cluster()).unwrap();
        let map: serde_json::Value = serde_json::from_str(&output).unwrap();
        let gpu = &map["nodes"][1]["gpus"][0];
        assert_eq!((&gpu["state"], &gpu["pods"][0]["name"]), (&"held".into(), &"train".into()));
        assert_eq!(map["nodes"][0]["freeGpus"], 8);
    }
}
