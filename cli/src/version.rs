//! `gantry version`: the version of this program, of the extender that leads, and of the plugins.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use gantry_api::GpuNode;
use gantry_extender::PublishedSettings;
use gantry_runtime::chain;
use kube::{Api, Client};
use serde::Serialize;

use crate::cluster::{ClusterArgs, SystemArgs};
use crate::map::list;
use crate::output::{json, yaml};
use crate::runtime::print;
use crate::visible::Visible;

/// Options of `gantry version`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
JSON (-o json), stable fields: client (version, commit, target); cluster (kubernetes; extender with version and
commit; plugins[] with version and nodes); error. What cannot be read is null.

Exit codes: 0 done, 1 the cluster cannot be read.")]
pub(crate) struct VersionArgs {
    #[command(flatten)]
    cluster: ClusterArgs,

    #[command(flatten)]
    system: SystemArgs,

    /// Only the version of this program
    #[arg(long)]
    client: bool,

    /// Output format
    #[arg(long, short, value_enum, value_name = "FORMAT", default_value_t)]
    output: Form,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Form {
    /// Lines
    #[default]
    Text,
    /// JSON
    Json,
    /// YAML
    Yaml,
}

#[derive(Debug, Serialize)]
struct Versions {
    client: Build,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<Cluster>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A program.
#[derive(Debug, Serialize)]
struct Build {
    version: String,
    commit: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
}

#[derive(Debug, Serialize)]
struct Cluster {
    kubernetes: String,
    /// The extender that leads, if it publishes itself.
    extender: Option<Build>,
    plugins: Vec<Plugins>,
}

#[derive(Debug, Serialize)]
struct Plugins {
    version: String,
    nodes: usize,
}

/// Runs `gantry version`.
///
/// # Errors
/// The cluster cannot be read; the version of this program is printed nevertheless.
pub(crate) async fn run(args: VersionArgs) -> anyhow::Result<()> {
    let client = Build {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: gantry_runtime::COMMIT.map(str::to_owned),
        target: Some(format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)),
    };
    let cluster = if args.client { None } else { Some(cluster(&args).await) };
    let (cluster, failed) = match cluster {
        None => (None, None),
        Some(Ok(cluster)) => (Some(cluster), None),
        Some(Err(error)) => (None, Some(error)),
    };
    let error = failed.as_ref().map(|error| chain(error.as_ref()));
    let versions = Versions { client, cluster, error };
    let text = match args.output {
        Form::Text => text(&versions),
        Form::Json => json(&versions)?,
        Form::Yaml => yaml(&versions)?,
    };
    print(&Visible::new(&text))?;
    failed.map_or(Ok(()), Err)
}

async fn cluster(args: &VersionArgs) -> anyhow::Result<Cluster> {
    let client = args.cluster.connect().await?;
    let kubernetes = client.apiserver_version().await.context("the API server does not respond")?;
    let settings = PublishedSettings::read(client.clone(), &args.system.system_namespace).await?;
    Ok(Cluster {
        kubernetes: kubernetes.git_version.trim_start_matches('v').to_owned(),
        extender: settings.map(|settings| Build {
            version: settings.version,
            commit: settings.commit,
            target: None,
        }),
        plugins: plugins(client).await?,
    })
}

async fn plugins(client: Client) -> anyhow::Result<Vec<Plugins>> {
    let nodes = list(Api::<GpuNode>::all(client), "GpuNodes").await?;
    let mut versions: BTreeMap<String, usize> = BTreeMap::new();
    for node in nodes {
        let version = node.status.map(|status| status.plugin_version).unwrap_or_default();
        *versions.entry(version).or_default() += 1;
    }
    Ok(versions.into_iter().map(|(version, nodes)| Plugins { version, nodes }).collect())
}

fn text(versions: &Versions) -> String {
    let mut out = String::new();
    let commit =
        |build: &Build| build.commit.as_deref().map(|it| format!(", commit {it}")).unwrap_or_default();
    let client = &versions.client;
    let target = client.target.as_deref().unwrap_or_default();
    // A String takes every write.
    let _ = writeln!(out, "gantry      {}{}, {target}", client.version, commit(client));
    let Some(cluster) = &versions.cluster else {
        return out;
    };
    let _ = writeln!(out, "kubernetes  {}", cluster.kubernetes);
    match &cluster.extender {
        Some(extender) => {
            let _ = writeln!(out, "extender    {}{}", extender.version, commit(extender));
        }
        None => out.push_str("extender    none that leads by a Lease\n"),
    }
    if cluster.plugins.is_empty() {
        out.push_str("plugin      on no node\n");
    }
    for plugins in &cluster.plugins {
        let version = if plugins.version.is_empty() { "unknown" } else { &plugins.version };
        let _ = writeln!(out, "plugin      {version} on {} node(s)", plugins.nodes);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_has_a_line() {
        let build = |commit: Option<&str>, target: Option<&str>| Build {
            version: "0.1.0".to_owned(),
            commit: commit.map(str::to_owned),
            target: target.map(str::to_owned),
        };
        let plugins = vec![
            Plugins { version: String::new(), nodes: 1 },
            Plugins { version: "0.1.0".to_owned(), nodes: 3 },
        ];
        let cluster =
            Cluster { kubernetes: "1.37.1".to_owned(), extender: Some(build(Some("abc"), None)), plugins };
        let mut versions =
            Versions { client: build(None, Some("x86_64-linux")), cluster: Some(cluster), error: None };
        insta::assert_snapshot!(text(&versions), @r"
        gantry      0.1.0, x86_64-linux
        kubernetes  1.37.1
        extender    0.1.0, commit abc
        plugin      unknown on 1 node(s)
        plugin      0.1.0 on 3 node(s)
        ");
        versions.cluster = None;
        assert_eq!(text(&versions), "gantry      0.1.0, x86_64-linux\n");
    }
}
