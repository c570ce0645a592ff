//! `gantry map`: the GPUs of the cluster, their links and their holders, as text, JSON or a picture. Reads GpuNodes and
//! Gangs, of the cluster or of a file; writes nothing.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::{Args, ValueEnum};
use clap_complete::ArgValueCompleter;
use gantry_api::{Gang, GpuNode};
use gantry_extender::args::levels;
use gantry_gang::Levels;
use gantry_map::{ClusterMap, Letters, Page};
use gantry_runtime::chain;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt as _};
use serde_json::Value;

use crate::cluster::{ClusterArgs, SystemArgs};
use crate::complete;
use crate::live_map::{LIST, LiveMap};
use crate::output::{Screenful, json, yaml};
use crate::runtime::{BadInput, print};
use crate::screen::Screen;
use crate::visible::Visible;

/// Options of `gantry map`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
JSON (-o json), stable fields: nodes[] (name, domain, model, links, notReady, freeGpus, gpus[]); gpus[] by index (state:
free, held, partlyHeld, reserved, leaving, cordoned or unhealthy; devices; pods[] of namespace, name, gang, devices,
hold; unhealthy; cordoned; reservedFor).

Examples:
  gantry map                                   every node; alike nodes are one line
  gantry map --fabric zone,rack=example.com/rack
                                               by zone and rack
  gantry map --free                            only nodes with free GPUs
  gantry map --gang research/train             only the nodes of a gang
  gantry map -w                                again whenever something changes
  gantry map -o svg > map.svg                  a picture for a browser
  kubectl get gpunodes,gangs -A -o yaml > cluster.yaml && gantry map --from cluster.yaml
                                               of a cluster that is elsewhere

Exit codes: 0 drawn, 1 the cluster cannot be read, 2 no such node or gang.")]
pub(crate) struct MapArgs {
    #[command(flatten)]
    origin: Origin,

    /// Read GpuNodes and Gangs from this file, YAML or JSON as kubectl writes them, instead of the cluster (- is
    /// standard input)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["watch", "fabric"])]
    from: Option<PathBuf>,

    #[command(flatten)]
    selection: Selection,

    /// Draw again whenever something changes
    #[arg(long, short)]
    watch: bool,

    /// Output format
    #[arg(long, short, value_enum, value_name = "FORMAT", default_value_t)]
    output: Output,
}

/// The cluster that is drawn.
#[derive(Debug, Clone, Args)]
pub(crate) struct Origin {
    #[command(flatten)]
    cluster: ClusterArgs,

    #[command(flatten)]
    system: SystemArgs,

    /// The levels of the fabric by which nodes are grouped [default: the extender's --fabric]
    #[arg(long, env = "GANTRY_FABRIC", value_name = "LEVELS", value_parser = levels)]
    fabric: Option<Levels>,
}

/// The nodes that are drawn.
#[derive(Debug, Clone, Args)]
pub(crate) struct Selection {
    /// Only this node
    #[arg(long, value_name = "NAME", add = ArgValueCompleter::new(complete::nodes))]
    pub(crate) node: Option<String>,

    /// Only nodes with pods or reservations of this gang or pod
    #[arg(long, value_name = "[NAMESPACE/]NAME")]
    pub(crate) gang: Option<String>,

    /// Only nodes with free GPUs
    #[arg(long)]
    pub(crate) free: bool,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Output {
    /// Lines for a terminal
    #[default]
    Text,
    /// The same with a line for every node
    Wide,
    /// JSON
    Json,
    /// YAML
    Yaml,
    /// The names of the GpuNodes, for kubectl
    Name,
    /// An SVG picture
    Svg,
}

/// Time in which several changes are drawn as one.
const SETTLE: Duration = Duration::from_secs(1);
/// Bytes of a file that are read: thousands of nodes.
const LARGEST: u64 = 256 << 20;
/// Time limit of one request.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The largest edit distance of a suggested name.
const NEAR: usize = 3;

/// Runs `gantry map`.
///
/// # Errors
/// The cluster cannot be read, or has no such node or gang.
pub(crate) async fn run(args: MapArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.from {
        let (gpu_nodes, gangs) = objects(path).map_err(BadInput)?;
        let map = ClusterMap::of(&gpu_nodes, &gangs, |_| String::new());
        return print(&output(&args, &args.selection.of(map)?)?);
    }
    let (client, fabric) = args.origin.connect().await?;
    let map = read(client.clone(), &fabric).await?;
    let drawn = output(&args, &args.selection.of(map)?)?;
    if !args.watch {
        return print(&drawn);
    }
    let mut screen = Screenful::default();
    screen.show(drawn)?;
    let mut live = LiveMap::watch(client, fabric);
    loop {
        live.changed().await;
        tokio::time::sleep(SETTLE).await;
        live.mark_seen();
        // A node or gang may be gone for now, and come back.
        if let Some(map) = live.map()
            && let Ok(map) = args.selection.of(map)
        {
            screen.show(output(&args, &map)?)?;
        }
    }
}

impl Origin {
    /// The cluster, and the levels of its fabric.
    ///
    /// # Errors
    /// The cluster cannot be read.
    pub(crate) async fn connect(&self) -> anyhow::Result<(Client, Levels)> {
        let client = self.cluster.connect().await?;
        let fabric = match &self.fabric {
            Some(fabric) => fabric.clone(),
            None => self.system.settings(client.clone()).await.terms()?.fabric,
        };
        Ok((client, fabric))
    }
}

/// The GpuNodes and Gangs of a file, as kubectl writes them: a list, or documents.
fn objects(path: &Path) -> anyhow::Result<(Vec<GpuNode>, Vec<Gang>)> {
    let mut text = String::new();
    let place = if path == Path::new("-") { "standard input".to_owned() } else { path.display().to_string() };
    let read = match path == Path::new("-") {
        true => std::io::stdin().take(LARGEST).read_to_string(&mut text),
        false => std::fs::File::open(path).and_then(|file| file.take(LARGEST).read_to_string(&mut text)),
    };
    read.with_context(|| format!("cannot read {place}"))?;
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text)
        .map_err(|error| anyhow!("{place}: {}", error.without_snippet()))?;
    let (mut gpu_nodes, mut gangs) = (Vec::new(), Vec::new());
    for document in documents {
        let items = match document["items"].as_array() {
            Some(items) => items.clone(),
            None => vec![document],
        };
        for item in items {
            let kind = item["kind"].as_str().unwrap_or_default().to_owned();
            let name = item["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let wrong = || format!("{place}: {kind} {name:?}");
            match &*kind {
                "GpuNode" => gpu_nodes.push(serde_json::from_value(item).with_context(wrong)?),
                "Gang" => gangs.push(serde_json::from_value(item).with_context(wrong)?),
                _ => {
                    return Err(anyhow!(
                        "{place}: kind {kind:?}; allowed are GpuNode, Gang, and lists of them"
                    ));
                }
            }
        }
    }
    Ok((gpu_nodes, gangs))
}

fn output(args: &MapArgs, map: &ClusterMap) -> anyhow::Result<Visible> {
    Ok(match args.output {
        Output::Json => Visible::new(&json(map)?),
        Output::Yaml => Visible::new(&yaml(map)?),
        Output::Name => {
            let names = map.nodes.iter().map(|node| format!("gpunode.gantry.dev/{}\n", node.name));
            Visible::new(&names.collect::<String>())
        }
        Output::Svg => Visible::new(&gantry_map::svg(map)),
        Output::Text | Output::Wide => {
            let mut letters = Letters::default();
            letters.learn(map);
            let page = Page { wide: matches!(args.output, Output::Wide), ..page() };
            let text = gantry_map::text(map, &letters, page);
            if page.color { Visible::colored(&text) } else { Visible::new(&text) }
        }
    })
}

/// Standard output as a page.
fn page() -> Page {
    let terminal = terminal_size::terminal_size().map_or(100, |(width, _)| width.0.into());
    let Screen { columns, color } = Screen::of_stdout(terminal);
    Page { columns: columns.clamp(40, 400), color, wide: false }
}

/// Reads the map of the cluster.
pub(crate) async fn read(client: Client, fabric: &Levels) -> anyhow::Result<ClusterMap> {
    let gpu_nodes = list(Api::<GpuNode>::all(client.clone()), "GpuNodes").await?;
    let gangs = list(Api::<Gang>::all(client.clone()), "Gangs").await?;
    let domains = domains(client, fabric).await?;
    Ok(ClusterMap::of(&gpu_nodes, &gangs, |node| domains.get(node).cloned().unwrap_or_default()))
}

/// All objects of a kind, a few per request.
pub(crate) async fn list<K>(api: Api<K>, kind: &str) -> anyhow::Result<Vec<K>>
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
    if fabric.0.is_empty() {
        return Ok(BTreeMap::new());
    }
    let api = Api::<Node>::all(client);
    let nodes: Vec<PartialObjectMeta<Node>> =
        pages(async |params| api.list_metadata(&params).await, "nodes").await?;
    let domain =
        |node: &PartialObjectMeta<Node>| fabric.path_of(|label| node.labels().get(label).map(String::as_str));
    Ok(nodes.iter().map(|node| (node.name_any(), domain(node))).collect())
}

impl Selection {
    /// The nodes that are selected.
    ///
    /// # Errors
    /// The cluster has no such node or gang.
    pub(crate) fn of(&self, mut map: ClusterMap) -> anyhow::Result<ClusterMap> {
        if let Some(name) = &self.node {
            if map.node(name).is_none() {
                let names = map.nodes.iter().map(|node| node.name.as_str());
                return Err(unknown("node with GPUs", name, names));
            }
            map.nodes.retain(|node| node.name == *name);
        }
        if let Some(name) = &self.gang {
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
        if self.free {
            map.nodes.retain(|node| node.free_gpus > 0);
        }
        Ok(map)
    }
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
        let map = args(words).selection.of(cluster()).map_err(|error| error.to_string())?;
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
