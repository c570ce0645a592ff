//! The pod of the chart's shape `own`, a kube-scheduler and an extender on one address, as processes with its
//! configuration and its identities.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, PodSpec};
use kube::Api;

use crate::components::Components;
use crate::error::file;
use crate::gantry::{NAMESPACE, program};
use crate::{Cluster, Daemon, Error, Program, Result};

/// The name of the Deployment and of its ConfigMap.
const OWN: &str = "gantry-scheduler";
/// The folder of a service account's files in a container.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The folder of the ConfigMap in a container.
const CONFIG: &str = "/etc/gantry-scheduler";
/// kube-scheduler's port is that of the cluster's own.
const PORT: &str = "--secure-port=10260";

impl Cluster {
    /// Starts the containers of one pod of the shape `own` next to the API server: kube-scheduler, then the extender.
    /// Paths and addresses of the pod are replaced by those of the sandbox, and nothing else of its configuration.
    ///
    /// # Errors
    /// The chart is not installed in this shape, or a program does not start.
    pub async fn start_own_scheduler(&self, binary: &Path) -> Result<[Daemon; 2]> {
        let api: Api<Deployment> = Api::namespaced(self.client(), NAMESPACE);
        let spec = api.get(OWN).await?.spec.and_then(|spec| spec.template.spec).unwrap_or_default();
        let server = format!("https://127.0.0.1:{}", self.port());

        let folder = self.control().folder().join(OWN);
        std::fs::create_dir_all(&folder).map_err(file("create", &folder))?;
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(file("write", &path))
        };
        let account = spec.service_account_name.clone().unwrap_or_default();
        write("token", &self.token(&account, None).await?)?;
        let authority = self.folder().join("pki/ca.crt");
        write("ca.crt", &std::fs::read_to_string(&authority).map_err(file("read", &authority))?)?;
        let maps: Api<ConfigMap> = Api::namespaced(self.client(), NAMESPACE);
        let here = folder.display().to_string();
        for (name, text) in maps.get(OWN).await?.data.unwrap_or_default() {
            let text = text.replace(ACCOUNT, &here).replace(CONFIG, &here);
            write(&name, &text.replace("https://kubernetes.default.svc", &server))?;
        }

        let container = container(&spec, "kube-scheduler")?;
        let words = spec.containers[container].command.iter().flatten().skip(1);
        let mut args: Vec<String> = words.map(|word| word.replace(CONFIG, &here)).collect();
        args.push(PORT.to_owned());
        let path = Components::locate_or_build()?.path("kube-scheduler");
        let scheduler =
            self.control().run(Program { name: OWN.to_owned(), path, args, env: BTreeMap::new() }).await?;

        let kubeconfig =
            self.credentials(self.control(), "gantry-own-extender", &spec, &server, None).await?;
        let only = PodSpec {
            containers: vec![spec.containers[self::container(&spec, "extender")?].clone()],
            ..spec
        };
        let extender = program("gantry-own-extender", binary, &only, &kubeconfig, self.control().name())?;
        Ok([scheduler, self.control().run(extender).await?])
    }
}

/// The place of a container in its pod.
fn container(spec: &PodSpec, name: &str) -> Result<usize> {
    spec.containers.iter().position(|container| container.name == name).ok_or_else(|| Error::UnknownProgram {
        name: name.to_owned(),
        sandbox: format!("the Deployment {OWN}"),
        known: spec.containers.iter().map(|container| container.name.as_str()).collect::<Vec<_>>().join(", "),
    })
}
