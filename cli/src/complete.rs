//! Completion of command lines by shells: a script for each shell, which calls this program for every word; names come
//! from the cluster that the words before name.

use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::Args;
use clap_complete::env::Shells;
use clap_complete::{CompletionCandidate, Shell};
use gantry_api::{Gang, GpuNode};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::ListParams;
use kube::{Api, Client, Resource, ResourceExt as _};

use crate::cluster::ClusterArgs;
use crate::runtime::print;
use crate::visible::Visible;

/// The variable by which a script calls this program.
pub(crate) const VARIABLE: &str = "COMPLETE";
/// Longest time for a list of names: a shell waits for it.
const PATIENCE: Duration = Duration::from_secs(3);
/// Names at most.
const NAMES: u32 = 500;

/// Options of `gantry completion`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  source <(gantry completion bash)
  gantry completion zsh > \"${fpath[1]}/_gantry\"
  gantry completion fish > ~/.config/fish/completions/gantry.fish

Pods, gangs, nodes, namespaces and contexts are completed with the names of the cluster.")]
pub(crate) struct CompletionArgs {
    /// The shell
    shell: Shell,
}

/// Prints the script for a shell.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn run(args: &CompletionArgs) -> anyhow::Result<()> {
    let shells = Shells::builtins();
    let shell = shells.completer(&args.shell.to_string()).ok_or_else(|| anyhow!("unknown shell"))?;
    let mut script = Vec::new();
    shell
        .write_registration(VARIABLE, "gantry", "gantry", "gantry", &mut script)
        .context("writing the script")?;
    script.flush().context("writing the script")?;
    print(&Visible::new(&String::from_utf8_lossy(&script)))
}

/// Names of pods.
pub(crate) fn pods(word: &OsStr) -> Vec<CompletionCandidate> {
    from_cluster(word, async |client, namespace| names(Api::<Pod>::namespaced(client, &namespace)).await)
}

/// Names of Gang objects.
pub(crate) fn gangs(word: &OsStr) -> Vec<CompletionCandidate> {
    from_cluster(word, async |client, namespace| names(Api::<Gang>::namespaced(client, &namespace)).await)
}

/// Names of nodes with GPUs.
pub(crate) fn nodes(word: &OsStr) -> Vec<CompletionCandidate> {
    from_cluster(word, async |client, _| names(Api::<GpuNode>::all(client)).await)
}

/// Names of namespaces.
pub(crate) fn namespaces(word: &OsStr) -> Vec<CompletionCandidate> {
    from_cluster(word, async |client, _| names(Api::<Namespace>::all(client)).await)
}

/// Names of the kubeconfig's contexts.
pub(crate) fn contexts(word: &OsStr) -> Vec<CompletionCandidate> {
    let (cluster, _) = named(std::env::args_os());
    let kubeconfig = cluster.kubeconfig().ok().flatten();
    let contexts = kubeconfig.and_then(|path| gantry_runtime::contexts(&path).ok()).unwrap_or_default();
    candidates(word, contexts)
}

/// The candidates among names of the cluster. None if it does not respond in time: a shell shows no errors.
fn from_cluster(
    word: &OsStr,
    list: impl AsyncFnOnce(Client, String) -> Vec<String>,
) -> Vec<CompletionCandidate> {
    let (cluster, namespace) = named(std::env::args_os());
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let listing = async {
        let client = cluster.connect().await.ok()?;
        let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
        Some(list(client, namespace).await)
    };
    let found = runtime.block_on(async { tokio::time::timeout(PATIENCE, listing).await });
    runtime.shutdown_background();
    candidates(word, found.ok().flatten().unwrap_or_default())
}

async fn names<K>(api: Api<K>) -> Vec<String>
where
    K: Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let list = api.list_metadata(&ListParams::default().limit(NAMES)).await;
    list.map(|list| list.items.iter().map(|item| item.name_any()).collect()).unwrap_or_default()
}

fn candidates(word: &OsStr, names: Vec<String>) -> Vec<CompletionCandidate> {
    let word = word.to_string_lossy();
    names.into_iter().filter(|name| name.starts_with(&*word)).map(CompletionCandidate::new).collect()
}

/// The cluster and the namespace that the words of a command line name.
fn named(line: impl IntoIterator<Item = OsString>) -> (ClusterArgs, Option<String>) {
    let mut cluster =
        ClusterArgs { kubeconfig: std::env::var_os("KUBECONFIG").map(PathBuf::from), context: None };
    let mut namespace = None;
    let words: Vec<String> = line.into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
    for (at, word) in words.iter().enumerate() {
        let (option, value) = match word.split_once('=') {
            Some((option, value)) => (option, Some(value.to_owned())),
            None => (word.as_str(), words.get(at + 1).cloned()),
        };
        match option {
            "--kubeconfig" => cluster.kubeconfig = value.map(PathBuf::from),
            "--context" => cluster.context = value,
            "-n" | "--namespace" => namespace = value,
            _ => {}
        }
    }
    (cluster, namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_before_name_cluster_and_namespace() {
        let line = "gantry -- gantry explain pod --context=lab -n ml --kubeconfig /k/c tr";
        let (cluster, namespace) = named(line.split(' ').map(OsString::from));
        assert_eq!(cluster.kubeconfig.as_deref(), Some("/k/c".as_ref()));
        assert_eq!((cluster.context.as_deref(), namespace.as_deref()), (Some("lab"), Some("ml")));
    }
}
