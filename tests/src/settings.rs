//! Settings of the cluster's programs outside `manifests/`: addresses, certificates, and what several kubelets and
//! containerds on one machine need.

use std::path::Path;

use serde_json::{Value, json};

use crate::host::CNI_PLUGINS;
use crate::image::PAUSE_IMAGE;
use crate::{Feature, Kubernetes};

/// The control plane's address on the bridge that joins the nodes.
pub(crate) const CONTROL_ADDRESS: &str = "10.87.0.1";
/// The first address of the service range, which the API server gives itself.
pub(crate) const SERVICE_ADDRESS: &str = "10.96.0.1";
/// The address of the cluster's DNS, and the domain of its names.
pub(crate) const NAMES_ADDRESS: &str = "10.96.0.10";
pub(crate) const DOMAIN: &str = "cluster.local";
/// Where containerd listens in each node.
pub(crate) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";

/// A node's place in the cluster's network, counted from 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place(pub(crate) usize);

impl Place {
    /// The node's address on the bridge.
    pub(crate) fn address(self) -> String {
        format!("10.87.0.{}", 10 + self.0)
    }

    /// The addresses of the node's pods.
    pub(crate) fn pods(self) -> String {
        format!("10.88.{}.0/24", self.0)
    }
}

/// containerd's configuration, with a container runtime.
pub(crate) fn containerd(runtime: &Path) -> String {
    let runtime = runtime.display();
    // CAP_SYS_RESOURCE may be missing (a container, a small VM): a score below one's own cannot be set then.
    format!(
        r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri"]

[grpc]
address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
disable_apparmor = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{CNI_PLUGINS}"]
conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{runtime}"
SystemdCgroup = false
"#
    )
}

/// The CNI configuration of a node.
pub(crate) fn cni(place: Place) -> Value {
    json!({
        "cniVersion": "0.4.0",
        "name": "gantry",
        "plugins": [{
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": true,
            "ipMasq": false,
            "ipam": {
                "type": "host-local",
                "ranges": [[{ "subnet": place.pods() }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    })
}

/// The configuration of a node's kubelet. `pki` holds `ca.crt` and the node's serving certificate.
pub(crate) fn kubelet(kubernetes: &Kubernetes, name: &str, pki: &Path, cgroup: &str) -> Value {
    let pki = |file: &str| pki.join(file).display().to_string();
    let mut config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": false },
            "x509": { "clientCAFile": pki("ca.crt") },
        },
        "authorization": { "mode": "AlwaysAllow" },
        "tlsCertFile": pki(&format!("{name}-serving.crt")),
        "tlsPrivateKeyFile": pki(&format!("{name}-serving.key")),
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup,
        "failSwapOn": false,
        "enforceNodeAllocatable": ["none"],
        "oomScoreAdj": 0,
        "makeIPTablesUtilChains": false,
        "localStorageCapacityIsolation": false,
        "resolvConf": "",
        "clusterDNS": [NAMES_ADDRESS],
        "clusterDomain": DOMAIN,
        "maxPods": 250,
        // The machine's disk and memory are shared with everything else on it: never evict for them.
        "evictionHard": {
            "memory.available": "1Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
            "imagefs.available": "0%", "imagefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        // What plugins offer reaches the API server with kubelet's next look; tests that change it would wait for the
        // usual ten seconds.
        "nodeStatusUpdateFrequency": "1s",
        // Tests bind hundreds of pods at once; the default limits of a real node would be what is measured.
        "kubeAPIQPS": 500,
        "kubeAPIBurst": 1000,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
    });
    if kubernetes.has(Feature::FailCgroupV1) {
        config["failCgroupV1"] = false.into();
    }
    config
}

/// The scheduler's configuration where none is given: stock, without an extender.
pub(crate) fn stock_scheduler() -> Value {
    json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": { "kubeconfig": SCHEDULER_KUBECONFIG },
        "leaderElection": { "leaderElect": false },
    })
}

/// Where kube-scheduler's configuration expects its credentials, as on clusters set up by kubeadm.
pub(crate) const SCHEDULER_KUBECONFIG: &str = "/etc/kubernetes/scheduler.conf";
