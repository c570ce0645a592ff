//! The project's own daemons on a cluster: installed by `manifests/`, as an operator would, then started as processes
//! with the arguments, environment and service account that the manifests give them. Only the image is passed over, as
//! there is no registry: the DaemonSets match no node.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Node as NodeObject, PodSpec, ServiceAccount};
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::cluster::{Cluster, Node};
use crate::error::file;
use crate::hardware::Hardware;
use crate::settings::CONTROL_ADDRESS;
use crate::{Daemon, Error, Program, Result, Sandbox, pki};

/// The namespace that `manifests/` installs into.
pub const NAMESPACE: &str = "gantry-system";
/// The name of the node daemon's DaemonSet, and of its process on each node.
pub const PLUGIN: &str = "gantry-plugin";
/// The name of the extender's DaemonSet, and of its process.
pub const EXTENDER: &str = "gantry-extender";

/// The project's folder, with `manifests/` and the simulator's machine files.
const PROJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// The folder with what an operator applies.
#[must_use]
pub fn manifests() -> PathBuf {
    Path::new(PROJECT).join("manifests")
}

/// Three unlike machines: a mesh of unequal links, a switch, and plain PCIe.
#[must_use]
pub fn unlike_machines() -> Vec<PathBuf> {
    ["dgx1-v100", "dgx-a100", "l4-4x-pcie"].map(machine_file).to_vec()
}

/// The simulator's machine of that name.
#[must_use]
pub fn machine_file(name: &str) -> PathBuf {
    Path::new(PROJECT).join(format!("simulator/machines/{name}.yaml"))
}

/// The `gantry` program: `$GANTRY_BINARY`, or the one that cargo built next to the running program.
#[must_use]
pub fn binary() -> Option<PathBuf> {
    let named = std::env::var_os("GANTRY_BINARY").map(PathBuf::from);
    named.or_else(|| {
        let own = std::env::current_exe().ok()?;
        own.ancestors().skip(1).take(2).map(|folder| folder.join("gantry")).find(|path| path.exists())
    })
}

/// Writes kube-scheduler's configuration, as `gantry scheduler-config` prints it for all MIG profiles and the given
/// resources, into a file.
///
/// # Errors
/// The program fails, or the file cannot be written.
pub fn write_scheduler_config(binary: &Path, resources: &str, path: &Path) -> Result<()> {
    let mut command = std::process::Command::new(binary);
    command.args(["scheduler-config", "--mig-profiles", "--resource", resources]);
    let text = crate::components::run(command)?;
    std::fs::write(path, text).map_err(file("write", path))
}

/// A day: longer than any cluster of tests stands.
const TOKEN_SECONDS: i64 = 24 * 3600;

impl Cluster {
    /// The report of `gantry doctor`, with further arguments, and its exit code.
    ///
    /// # Errors
    /// It cannot be started, or writes no report.
    pub fn doctor(&self, binary: &Path, more: &[&str]) -> Result<(Value, Option<i32>)> {
        let kubeconfig = format!("--kubeconfig={}", self.kubeconfig().display());
        let mut command = std::process::Command::new(binary);
        command.args(["doctor", "--output=json", &kubeconfig]).args(more);
        let output = command
            .output()
            .map_err(|source| Error::Start { program: binary.display().to_string(), source })?;
        let report = serde_json::from_slice(&output.stdout).map_err(|_| Error::Command {
            command: format!("{command:?}"),
            status: output.status,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })?;
        Ok((report, output.status.code()))
    }

    /// Applies the project's manifests.
    ///
    /// # Errors
    /// The API server refuses one of them.
    pub async fn install(&self, manifests: &Path) -> Result<()> {
        let folder = manifests.display().to_string();
        self.kubectl(&["apply", "-k", &folder]).await.map(drop)
    }

    /// Gives each node the simulated GPUs of a machine file, in the nodes' order, and starts the daemons.
    ///
    /// # Errors
    /// A machine file is wrong, or a daemon does not start.
    pub async fn start_gantry(&self, binary: &Path, machines: &[PathBuf]) -> Result<Vec<Hardware>> {
        let mut all = Vec::new();
        for (node, machine) in self.nodes().iter().zip(machines) {
            let hardware = Hardware::install(node, machine)?;
            self.start_plugin(node, binary, &hardware.plugin_args()).await?;
            all.push(hardware);
        }
        self.start_extender(binary).await?;
        Ok(all)
    }

    /// Starts the extender next to kube-scheduler.
    ///
    /// # Errors
    /// The manifests are not installed, or the program does not start.
    pub async fn start_extender(&self, binary: &Path) -> Result<Daemon> {
        self.start_replica(binary, EXTENDER, None, &[]).await
    }

    /// Starts one of several extenders, with its own name, which is also its pod's. `listen` replaces the manifests'
    /// address, and `extra` are additional arguments. Metrics get a free port.
    ///
    /// # Errors
    /// The manifests are not installed, or the program does not start.
    pub async fn start_replica(
        &self,
        binary: &Path,
        name: &str,
        listen: Option<&str>,
        extra: &[String],
    ) -> Result<Daemon> {
        let api: Api<DaemonSet> = Api::namespaced(self.client(), NAMESPACE);
        let spec = api.get(EXTENDER).await?.spec.and_then(|spec| spec.template.spec).unwrap_or_default();
        let server = format!("https://127.0.0.1:{}", self.port());
        let kubeconfig = self.credentials(self.control(), name, &spec, &server, None).await?;
        let mut program = program(name, binary, &spec, &kubeconfig, self.control().name())?;
        if let Some(listen) = listen {
            // One of several answers there.
            program.args.retain(|arg| !arg.starts_with("--explain-listen="));
            for (flag, address) in [("--listen", listen), ("--metrics-listen", "127.0.0.1:0")] {
                let place = program.args.iter().position(|arg| arg == flag);
                match place.and_then(|place| program.args.get_mut(place + 1)) {
                    Some(told) => address.clone_into(told),
                    None => program.args.extend([flag.to_owned(), address.to_owned()]),
                }
            }
        }
        program.args.extend_from_slice(extra);
        self.control().run(program).await
    }

    /// Starts the node daemon on a node, with arguments beyond those of the manifests, such as where a simulated
    /// driver lies.
    ///
    /// # Errors
    /// The manifests are not installed, or the program does not start.
    pub async fn start_plugin(&self, node: &Node, binary: &Path, extra: &[String]) -> Result<Daemon> {
        let api: Api<DaemonSet> = Api::namespaced(self.client(), NAMESPACE);
        let spec = api.get(PLUGIN).await?.spec.and_then(|spec| spec.template.spec).unwrap_or_default();
        let object = Api::<NodeObject>::all(self.client()).get(node.name()).await?;
        // The token of a DaemonSet's pod names its node, and the admission policies rely on it.
        let bound = BoundObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: object.metadata.name,
            uid: object.metadata.uid,
        };
        let server = format!("https://{CONTROL_ADDRESS}:{}", self.port());
        let kubeconfig = self.credentials(node.sandbox(), PLUGIN, &spec, &server, Some(bound)).await?;
        let mut program = program(PLUGIN, binary, &spec, &kubeconfig, node.name())?;
        program.args.extend_from_slice(extra);
        node.run(program).await
    }

    /// A token of a service account of [`NAMESPACE`].
    pub(crate) async fn token(&self, account: &str, bound: Option<BoundObjectReference>) -> Result<String> {
        let request = TokenRequest {
            spec: TokenRequestSpec {
                audiences: Vec::new(),
                bound_object_ref: bound,
                expiration_seconds: Some(TOKEN_SECONDS),
            },
            ..TokenRequest::default()
        };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), NAMESPACE);
        let answer = accounts.create_token_request(account, &PostParams::default(), &request).await?;
        Ok(answer.status.map(|status| status.token).unwrap_or_default())
    }

    /// Writes a kubeconfig with a token of the workload's service account.
    pub(crate) async fn credentials(
        &self,
        sandbox: &Sandbox,
        name: &str,
        spec: &PodSpec,
        server: &str,
        bound: Option<BoundObjectReference>,
    ) -> Result<PathBuf> {
        let account = spec.service_account_name.as_deref().unwrap_or("default");
        let token = self.token(account, bound).await?;
        let authority = self.folder().join("pki/ca.crt");
        let pem = std::fs::read_to_string(&authority).map_err(file("read", &authority))?;
        let path = sandbox.folder().join(format!("{name}.conf"));
        pki::write_kubeconfig(&path, server, &pem, &json!({ "token": token }))?;
        Ok(path)
    }
}

/// A workload's first container as a process.
pub(crate) fn program(
    name: &str,
    binary: &Path,
    spec: &PodSpec,
    kubeconfig: &Path,
    node: &str,
) -> Result<Program> {
    let container = spec.containers.first().ok_or_else(|| Error::UnknownProgram {
        name: name.to_owned(),
        sandbox: "the manifests".to_owned(),
        known: String::new(),
    })?;
    let mut env = BTreeMap::from([("KUBECONFIG".to_owned(), kubeconfig.display().to_string())]);
    for variable in container.env.iter().flatten() {
        let field = variable.value_from.as_ref().and_then(|from| from.field_ref.as_ref());
        let value = match field.map(|field| field.field_path.as_str()) {
            Some("spec.nodeName") => node.to_owned(),
            Some("metadata.namespace") => NAMESPACE.to_owned(),
            Some("metadata.name") => format!("{name}-{node}"),
            _ => variable.value.clone().unwrap_or_default(),
        };
        env.insert(variable.name.clone(), value);
    }
    let args = container.args.clone().unwrap_or_default();
    Ok(Program { name: name.to_owned(), path: binary.to_path_buf(), args, env })
}
