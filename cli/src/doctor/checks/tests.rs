//! Each check against a fault planted in the answers of a healthy cluster.

use serde_json::json;

use super::*;

const NOW: &str = "2026-11-25T12:00:00Z";

/// The answers of a healthy cluster in the shape `existing`: two nodes, one with MIG.
fn healthy() -> Answers {
    let crd = json!({"spec": {"versions": [{"name": "v1alpha1", "served": true}]},
        "status": {"conditions": [{"type": "Established", "status": "True"}]}});
    let named = |name: &str| json!({"metadata": {"name": name}});
    let policies: BTreeSet<&str> =
        PLUGIN_POLICIES.into_iter().chain(EXTENDER_POLICIES).chain(["gantry-gang-annotations"]).collect();
    let bindings: Vec<Value> = policies
        .iter()
        .map(|name| json!({"metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}}))
        .collect();
    let set = |name: &str| {
        let annotations = json!({"meta.helm.sh/release-name": "gantry"});
        json!({"metadata": {"name": name, "namespace": "gantry-system", "annotations": annotations},
            "spec": {"template": {"spec": {"containers": [{"image": "gantry:0.1.0"}]}}},
            "status": {"desiredNumberScheduled": 1, "numberReady": 1}})
    };
    let pod = |name: &str, app: &str, node: &str| {
        json!({"metadata": {"name": name, "labels": {"app.kubernetes.io/name": app}}, "spec": {"nodeName": node},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    };
    let node = |name: &str, mig: &str| {
        json!({"metadata": {"name": name, "labels": {"gantry.dev/gpu": "true", "gantry.dev/mig": mig,
            "nvidia.com/gpu.product": "NVIDIA-A100"}}})
    };
    let gpu_node = |name: &str, mig: bool, resource: &str| {
        json!({"metadata": {"name": name},
            "spec": {"machine": {"host": {"driver": "550.54"}, "gpus": [{"mig": {"enabled": mig}}]}},
            "status": {"pluginVersion": env!("CARGO_PKG_VERSION"),
                "resources": [{"name": resource, "kind": "Gpu"}],
                "holders": [{"namespace": "default", "pod": name, "resource": resource}],
                "conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "message": ""}]}})
    };
    let lease = |name: &str| json!({"metadata": {"name": name}, "spec": {"holderIdentity": "x", "renewTime": "2026-11-25T11:59:57.000000Z"}});
    let granted = |name: &str| json!({"metadata": {"name": name, "namespace": "default", "annotations": {"gantry.dev/grant": "{}"}}});
    let page = "gantry_extender_requests_total{verb=\"filter\",code=\"200\"} 7\n\
                gantry_extender_requests_total{verb=\"other\",code=\"200\"} 70\n\
                gantry_extender_object_bytes_limit 1000000\n\
                gantry_extender_object_bytes{namespace=\"cluster\"} 900000\n\
                gantry_extender_object_bytes{namespace=\"default\"} 1000\n";
    let read = [
        ("version", json!({"gitVersion": "v1.33.1-eks-1", "minor": "33+"})),
        ("crd-gpunodes", crd.clone()),
        ("crd-gangs", crd),
        ("policies", policies.iter().map(|name| named(name)).collect()),
        ("bindings", Value::Array(bindings)),
        ("daemonsets", json!([set("gantry-plugin"), set("gantry-plugin-mig"), set("gantry-extender")])),
        ("deployments", json!([])),
        ("nodes", json!([node("a", "false"), node("b", "true")])),
        (
            "gpunodes",
            json!([gpu_node("a", false, "nvidia.com/gpu"), gpu_node("b", true, "nvidia.com/mig-1g.5gb")]),
        ),
        ("gangs", json!([])),
        (
            "own-pods",
            json!([
                pod("gantry-plugin-1", "gantry-plugin", "a"),
                pod("gantry-plugin-mig-1", "gantry-plugin-mig", "b"),
                pod("gantry-extender-1", "gantry-extender", "control"),
            ]),
        ),
        ("mount-events", json!([])),
        ("leases", json!([lease("gantry-extender")])),
        ("node-leases", json!([lease("a"), lease("b")])),
        (
            "namespaces",
            json!([{"metadata": {"name": "monitoring", "labels": {"gantry.dev/metrics": "true"}}}]),
        ),
        ("pods", json!([granted("a"), granted("b")])),
        ("rights", json!([])),
        ("metrics/gantry-extender-1", json!(page)),
        ("runtime-classes", json!([])),
    ];
    let read = read.into_iter().map(|(name, value)| (name.to_owned(), Answer::Found(value)));
    Answers::recorded(read.collect(), NOW.parse().unwrap())
}

fn config(names: &[&str]) -> Value {
    let names: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
    json!({"extenders": [{"urlPrefix": "http://127.0.0.1:8010", "bindVerb": "bind", "managedResources": names}]})
}

fn good_config() -> Value {
    config(&["nvidia.com/gpu", "nvidia.com/mig-1g.5gb"])
}

/// The value of a recorded answer.
fn value<'a>(answers: &'a mut Answers, name: &str) -> &'a mut Value {
    match answers.answer(name) {
        Answer::Found(value) => value,
        other => panic!("{name}: {other:?}"),
    }
}

/// A fault changes the outcome of one check only, and the fix names the remedy.
#[track_caller]
fn planted(check: &str, outcome: Outcome, fix: &str, fault: impl FnOnce(&mut Answers)) {
    planted_with(check, outcome, fix, &good_config(), fault);
}

#[track_caller]
fn planted_with(check: &str, outcome: Outcome, fix: &str, config: &Value, fault: impl FnOnce(&mut Answers)) {
    let mut answers = healthy();
    fault(&mut answers);
    let reports = all(&answers, Some(config));
    let wrong: Vec<&Report> = reports.iter().filter(|report| report.outcome != Outcome::Passed).collect();
    assert_eq!(wrong.len(), 1, "{wrong:#?}");
    assert_eq!((wrong[0].check, wrong[0].outcome), (check, outcome), "{wrong:#?}");
    let advice = wrong[0].fix.clone().unwrap_or_default();
    assert!(advice.contains(fix), "{advice}");
    assert!(!wrong[0].message.is_empty());
}

/// All members of a training job wait for the slowest.
#[test]
fn slow_member_of_a_gang_is_a_warning() {
    let gang = |name: &str, status: &str| {
        let text = "train-3: GPU 4 of node-1 runs at 60 % of its highest clock, the other members at 90 %";
        json!({"metadata": {"name": name, "namespace": "research"}, "status": {"conditions": [
            {"type": "Bound", "status": "True", "message": "bound"},
            {"type": "MembersSlow", "status": status, "message": text},
        ]}})
    };
    planted("slow-members", Outcome::Warning, "kubectl -n research describe gang train", |answers| {
        *value(answers, "gangs") =
            json!([gang("other", "False"), gang("train", "True"), gang("more", "True")]);
    });
    let mut answers = healthy();
    *value(&mut answers, "gangs") = json!([gang("train", "True")]);
    let reports = all(&answers, Some(&good_config()));
    let report = reports.iter().find(|report| report.check == "slow-members").unwrap();
    insta::assert_snapshot!(
        report.message,
        @"gang research/train has a slow member: train-3: GPU 4 of node-1 runs at 60 % of its highest clock, the other members at 90 %"
    );
}

#[test]
fn healthy_cluster_passes_every_check() {
    let reports = all(&healthy(), Some(&good_config()));
    let wrong: Vec<&Report> = reports.iter().filter(|report| report.outcome != Outcome::Passed).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(reports.len(), CHECKS.len());
    insta::assert_snapshot!(super::super::text(&reports, None));
}

#[test]
fn cluster_without_anything_fails_with_remedies() {
    let answers = Answers::recorded(BTreeMap::new(), NOW.parse().unwrap());
    insta::assert_snapshot!(super::super::text(&all(&answers, None), Some(80)));
}

#[test]
fn old_kubernetes_is_reported() {
    planted("kubernetes", Outcome::Failed, "# upgrade the cluster to 1.30", |answers| {
        *value(answers, "version") = json!({"gitVersion": "v1.29.3", "minor": "29"});
    });
}

/// The chart, the oldest version that tests run on, and this check agree.
#[test]
fn oldest_kubernetes_is_that_of_chart_and_tests() {
    let chart = include_str!("../../../../charts/gantry/Chart.yaml");
    assert!(chart.contains(&format!("kubeVersion: \">=1.{OLDEST}.0-0\"\n")), "{chart}");
    let releases = include_str!("../../../../tests/components/kubernetes/releases");
    let minors = releases.lines().map(|release| release.split('.').nth(1).unwrap().parse().unwrap());
    assert_eq!(minors.min(), Some(OLDEST));
}

#[test]
fn missing_and_unserved_crds_are_reported() {
    planted("crds", Outcome::Failed, "crds.install=true", |answers| {
        *answers.answer("crd-gangs") = Answer::Absent;
    });
    planted("crds", Outcome::Failed, "crds.install=true", |answers| {
        value(answers, "crd-gpunodes")["spec"]["versions"][0]["served"] = json!(false);
    });
    planted("crds", Outcome::Failed, "crds.install=true", |answers| {
        value(answers, "crd-gpunodes")["status"]["conditions"][0]["status"] = json!("False");
    });
}

#[test]
fn missing_and_auditing_policies_are_reported() {
    planted("policies", Outcome::Failed, "guard.enabled=true", |answers| {
        value(answers, "policies").as_array_mut().unwrap().remove(0);
    });
    planted("policies", Outcome::Failed, "guard.enabled=true", |answers| {
        value(answers, "bindings")[2]["spec"]["validationActions"] = json!(["Audit"]);
    });
    planted("policies", Outcome::Failed, "guard.enabled=true", |answers| {
        let policies = value(answers, "policies").as_array_mut().unwrap();
        policies.retain(|policy| policy["metadata"]["name"] != "gantry-gang-annotations");
    });
}

#[test]
fn missing_right_is_reported() {
    planted("rights", Outcome::Failed, "helm upgrade", |answers| {
        *value(answers, "rights") = json!([{"account": "gantry-extender", "right": "create pods/binding"}]);
    });
    planted("rights", Outcome::Unknown, "subjectaccessreviews", |answers| {
        *answers.answer("rights") = Answer::Unreadable("forbidden".to_owned());
    });
}

#[test]
fn pods_that_are_not_ready_are_reported() {
    planted("plugin-pods", Outcome::Failed, "describe pod gantry-plugin-1\n", |answers| {
        value(answers, "daemonsets")[0]["status"]["numberReady"] = json!(0);
        value(answers, "own-pods")[0]["status"]["conditions"][0]["status"] = json!("False");
    });
    planted("plugin-pods", Outcome::Failed, "gantry.dev/gpu=true", |answers| {
        for set in [0, 1] {
            value(answers, "daemonsets")[set]["status"] =
                json!({"desiredNumberScheduled": 0, "numberReady": 0});
        }
    });
    planted("plugin-pods", Outcome::Failed, "gantry doctor --system-namespace", |answers| {
        value(answers, "daemonsets")[0]["metadata"]["namespace"] = json!("elsewhere");
    });
}

#[test]
fn other_kubelet_directory_is_reported() {
    planted("kubelet-directory", Outcome::Failed, "plugin.kubeletRoot", |answers| {
        *value(answers, "mount-events") = json!([
            {"involvedObject": {"name": "gantry-plugin-1"}, "message": "MountVolume.SetUp failed for volume \"device-plugins\" : hostPath type check failed: /var/lib/kubelet/device-plugins is not a directory"},
        ]);
    });
}

#[test]
fn marked_node_without_plugin_is_reported() {
    planted("gpu-nodes", Outcome::Failed, "spec.nodeName=c", |answers| {
        let nodes = value(answers, "nodes").as_array_mut().unwrap();
        nodes.push(json!({"metadata": {"name": "c", "labels": {"nvidia.com/gpu.present": "true"}}}));
        nodes.push(json!({"metadata": {"name": "d", "labels": {"nvidia.com/gpu.present": "true", "gantry.dev/gpu": "false"}}}));
    });
}

#[test]
fn node_marked_by_its_cloud_is_reported() {
    planted("gpu-nodes", Outcome::Failed, "spec.nodeName=c", |answers| {
        let nodes = value(answers, "nodes").as_array_mut().unwrap();
        nodes.push(
            json!({"metadata": {"name": "d", "labels": {"cloud.google.com/gke-accelerator": "nvidia-l4"}}}),
        );
        nodes.push(
            json!({"metadata": {"name": "c", "labels": {"kubernetes.azure.com/accelerator": "nvidia"}}}),
        );
    });
}

/// The doctor expects a plugin on the nodes that the DaemonSet selects.
#[test]
fn gpu_nodes_are_those_of_the_daemonset() {
    let manifest = include_str!("../../../../manifests/plugin.yaml");
    let objects: Vec<Value> = serde_saphyr::from_multiple(manifest).unwrap();
    let mut sets = objects.iter().filter(|object| object["kind"] == "DaemonSet");
    let affinity = &sets.next().unwrap()["spec"]["template"]["spec"]["affinity"]["nodeAffinity"];
    let terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"].as_array();
    let wanted = terms.unwrap().iter().map(|term| {
        let labels = term["matchExpressions"].as_array().unwrap().iter();
        let labels = labels.filter(|expression| expression["operator"] != "NotIn");
        labels.map(|label| (label["key"].as_str().unwrap(), label["values"][0].as_str())).collect::<Vec<_>>()
    });
    assert_eq!(wanted.collect::<Vec<_>>(), GPU_NODES.map(<[_]>::to_vec));
}

/// Sets the condition Ready of the node `a`.
fn condition(answers: &mut Answers, reason: &str, message: &str) {
    value(answers, "gpunodes")[0]["status"]["conditions"][0] =
        json!({"type": "Ready", "status": "False", "reason": reason, "message": message});
}

#[test]
fn missing_driver_and_runtime_class_are_distinguished() {
    planted("driver", Outcome::Failed, "# install the NVIDIA driver", |answers| {
        condition(answers, "NoDevices", "libnvidia-ml.so.1 cannot be opened");
    });
    planted("driver", Outcome::Failed, "plugin.runtimeClassName=nvidia", |answers| {
        condition(answers, "NoDevices", "libnvidia-ml.so.1 cannot be opened");
        *value(answers, "runtime-classes") = json!([{"metadata": {"name": "nvidia"}}]);
    });
}

#[test]
fn plugin_that_does_not_serve_is_reported() {
    for reason in ["NotRegistered", "Stopped", "PodsUnknown"] {
        planted("registration", Outcome::Failed, "logs gantry-plugin-1", |answers| {
            condition(answers, reason, "x");
        });
    }
    planted("registration", Outcome::Warning, "describe gpunode a", |answers| {
        condition(answers, "Degraded", "x");
    });
}

/// Lets the leader publish its version.
fn leader(answers: &mut Answers, version: &str) {
    let settings = json!({"version": version}).to_string();
    value(answers, "leases")[0]["metadata"]["annotations"] = json!({SETTINGS_ANNOTATION: settings});
}

#[test]
fn version_skew_is_reported() {
    let plugin = |answers: &mut Answers, version: &str| {
        value(answers, "gpunodes")[1]["status"]["pluginVersion"] = json!(version);
    };
    planted("versions", Outcome::Warning, "# the CRDs first", |answers| plugin(answers, "0.0.1"));
    planted("versions", Outcome::Warning, "helm upgrade gantry", |answers| leader(answers, "0.1.7"));
    // The extender before the plugin.
    planted("versions", Outcome::Warning, "docs/how-to/upgrade.md", |answers| {
        leader(answers, env!("CARGO_PKG_VERSION"));
        plugin(answers, "0.2.0");
    });
    planted("versions", Outcome::Failed, "docs/how-to/upgrade.md", |answers| {
        leader(answers, "0.3.0");
        plugin(answers, "0.1.9");
    });
}

#[test]
fn releases_next_to_each_other_work_together() {
    let cases = [
        ("0.1.0", "0.1.0", true),
        ("0.1.0", "0.2.4", true),
        ("0.2.0", "0.1.0", true),
        ("0.1.0", "0.3.0", false),
        ("1.0.0", "0.9.0", false),
        ("odd", "odd", true),
        ("odd", "0.1.0", false),
    ];
    for (plugin, extender, expected) in cases {
        assert_eq!(work_together(plugin, extender), expected, "{plugin} {extender}");
    }
}

/// NVIDIA's plugin on other nodes is no fault.
#[test]
fn second_plugin_on_a_node_is_reported() {
    let with = |answers: &mut Answers, node: &str| {
        let set = json!({"metadata": {"name": "nvdp", "namespace": "nvidia"}, "spec": {"template": {"spec": {
            "containers": [{"image": "nvcr.io/nvidia/k8s-device-plugin:v0.17.0"}]}}}});
        value(answers, "daemonsets").as_array_mut().unwrap().push(set);
        assert_eq!(answers.rivals().len(), 1);
        *answers.answer("rival/nvidia/nvdp") = Answer::Found(json!([{"spec": {"nodeName": node}}]));
    };
    planted("other-plugin", Outcome::Failed, "kubectl -n nvidia delete daemonset nvdp", |answers| {
        with(answers, "b");
    });
    // Gantry's pod is not there yet.
    planted("other-plugin", Outcome::Failed, "kubectl -n nvidia delete daemonset nvdp", |answers| {
        with(answers, "b");
        value(answers, "own-pods").as_array_mut().unwrap().remove(1);
    });
    // Before the installation no node has a label of Gantry.
    let mut new = Answers::recorded(BTreeMap::new(), NOW.parse().unwrap());
    *new.answer("daemonsets") = Answer::Found(json!([]));
    *new.answer("nodes") = Answer::Found(json!([{"metadata": {"name": "a"}}]));
    with(&mut new, "a");
    let other = |answers: &Answers| {
        let reports = all(answers, None);
        reports.into_iter().find(|report| report.check == "other-plugin").unwrap()
    };
    let report = other(&new);
    assert_eq!(report.outcome, Outcome::Failed);
    insta::assert_snapshot!(report.message, @"the DaemonSet nvidia/nvdp serves the GPUs of a, where Gantry is to run");
    value(&mut new, "nodes")[0]["metadata"]["labels"] = json!({"gantry.dev/gpu": "false"});
    assert_eq!(other(&new).outcome, Outcome::Passed);
    let mut answers = healthy();
    with(&mut answers, "elsewhere");
    assert!(all(&answers, Some(&good_config())).iter().all(|report| report.outcome == Outcome::Passed));
}

#[test]
fn dra_on_the_same_node_is_reported() {
    planted("dra", Outcome::Failed, "gantry.dev/gpu=false", |answers| {
        *answers.answer("slices") = Answer::Found(json!([
            {"spec": {"driver": "gpu.nvidia.com", "nodeName": "b"}},
            {"spec": {"driver": "gpu.nvidia.com", "nodeName": "elsewhere"}},
            {"spec": {"driver": "compute-domain.nvidia.com", "nodeName": "a"}},
        ]));
    });
}

#[test]
fn mig_without_label_or_daemon_is_reported() {
    planted("mig", Outcome::Failed, "kubectl label node b gantry.dev/mig=true", |answers| {
        value(answers, "nodes")[1]["metadata"]["labels"]["gantry.dev/mig"] = json!("false");
    });
    planted("mig", Outcome::Failed, "plugin.mig.enabled=true", |answers| {
        value(answers, "daemonsets").as_array_mut().unwrap().remove(1);
    });
}

#[test]
fn missing_labels_are_reported() {
    planted("labels", Outcome::Warning, "plugin.labels=node", |answers| {
        let labels = value(answers, "nodes")[0]["metadata"]["labels"].as_object_mut().unwrap();
        labels.remove("nvidia.com/gpu.product");
    });
}

#[test]
fn missing_leader_is_reported() {
    planted("extender", Outcome::Failed, "logs", |answers| {
        value(answers, "leases")[0]["spec"]["renewTime"] = json!("2026-11-25T11:50:00.000000Z");
    });
    planted("extender", Outcome::Failed, "get pods", |answers| *value(answers, "leases") = json!([]));
}

#[test]
fn scheduler_that_does_not_call_is_reported() {
    planted("scheduler-calls", Outcome::Warning, "gantry scheduler-config", |answers| {
        let page = value(answers, "metrics/gantry-extender-1");
        *page = json!(page.as_str().unwrap().replace("} 7\n", "} 0\n"));
    });
}

#[test]
fn resources_that_the_scheduler_lacks_are_reported() {
    planted_with(
        "scheduler-resources",
        Outcome::Failed,
        "gantry scheduler-config",
        &config(&["nvidia.com/gpu"]),
        |_| {},
    );
    planted_with("scheduler-resources", Outcome::Failed, "gantry scheduler-config", &json!({}), |_| {});
    // An extender without names gets every pod.
    let reports = all(&healthy(), Some(&config(&[])));
    assert!(reports.iter().all(|report| report.outcome == Outcome::Passed));
}

/// Without the configuration a pod that has devices and no grant is the evidence.
#[test]
fn configuration_is_found_or_inferred() {
    let look = |answers: &Answers| {
        let reports = all(answers, None);
        reports.into_iter().find(|report| report.check == "scheduler-resources").unwrap()
    };
    let mut answers = healthy();
    assert_eq!(look(&answers).outcome, Outcome::Unknown);
    let annotations =
        value(&mut answers, "pods")[1]["metadata"].as_object_mut().unwrap().remove("annotations");
    assert!(annotations.is_some());
    let report = look(&answers);
    assert_eq!(report.outcome, Outcome::Failed);
    insta::assert_snapshot!(report.message, @"held without a grant, so bound without the extender: nvidia.com/mig-1g.5gb by default/b");
    *answers.answer("configz/kube-scheduler-x") =
        Answer::Found(json!({"kubescheduler.config.k8s.io": good_config()}));
    assert_eq!(look(&answers).outcome, Outcome::Passed);
    let text = serde_saphyr::to_string(&config(&[])).unwrap();
    *answers.answer("scheduler-map") = Answer::Found(json!({"data": {"config.yaml": text}}));
    insta::assert_snapshot!(look(&answers).message, @"kube-scheduler calls the extender for every pod of its profile");
}

/// A Secret with a certificate that ends on this day of 2026.
fn tls(month: u8, day: u8) -> Value {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.not_before = rcgen::date_time_ymd(2025, 1, 1);
    params.not_after = rcgen::date_time_ymd(2026, month, day);
    let pem = ByteString(params.self_signed(&key).unwrap().pem().into_bytes());
    json!({"metadata": {"name": "mine"}, "data": {"tls.crt": pem, "ca.crt": pem}})
}

#[test]
fn ending_certificates_are_reported() {
    let with =
        |secret: Value| move |answers: &mut Answers| *answers.answer("secret/tls") = Answer::Found(secret);
    planted("certificates", Outcome::Failed, "create secret generic mine", with(tls(11, 1)));
    planted("certificates", Outcome::Warning, "create secret generic mine", with(tls(12, 1)));
    planted(
        "certificates",
        Outcome::Failed,
        "docs/doctor.md#certificates-of-the-extender",
        with(json!({"data": {"tls.crt": "eA=="}})),
    );
    let mut answers = healthy();
    with(tls(12, 31))(&mut answers);
    assert!(all(&answers, Some(&good_config())).iter().all(|report| report.outcome == Outcome::Passed));
}

/// An installation with the webhook, with a certificate that ends on this day of 2026.
fn with_webhook(answers: &mut Answers, month: u8, day: u8) {
    let clients = json!([{"clientConfig": {"caBundle": "eA=="}}]);
    *answers.answer("webhook") = Answer::Found(json!({"webhooks": clients}));
    *answers.answer("secret/webhook") = Answer::Found(tls(month, day));
    let endpoints = json!([{"conditions": {"ready": false}}, {"conditions": {"ready": true}}]);
    *answers.answer("webhook-endpoints") = Answer::Found(json!([{"endpoints": endpoints}]));
}

#[test]
fn webhook_that_cannot_answer_is_reported() {
    let mut answers = healthy();
    with_webhook(&mut answers, 12, 31);
    let reports = all(&answers, Some(&good_config()));
    let report = reports.iter().find(|report| report.check == "webhook").unwrap();
    assert_eq!(
        (report.outcome, &*report.message),
        (Outcome::Passed, "extenders that assign pods to the scheduler: 1")
    );
    let secret = "delete secret gantry-webhook-tls";
    planted("webhook", Outcome::Failed, secret, |answers| with_webhook(answers, 11, 1));
    planted("webhook", Outcome::Warning, secret, |answers| with_webhook(answers, 12, 1));
    planted("webhook", Outcome::Failed, secret, |answers| {
        with_webhook(answers, 12, 31);
        *answers.answer("secret/webhook") = Answer::Absent;
    });
    planted("webhook", Outcome::Failed, "docs/doctor.md#certificate-of-the-webhook", |answers| {
        with_webhook(answers, 12, 31);
        value(answers, "webhook")["webhooks"][0]["clientConfig"] = json!({});
    });
    planted("webhook", Outcome::Failed, "get pods -l app.kubernetes.io/name=gantry-extender", |answers| {
        with_webhook(answers, 12, 31);
        value(answers, "webhook-endpoints")[0]["endpoints"] = json!([{"conditions": {"ready": false}}]);
    });
}

#[test]
fn wrong_clocks_are_reported() {
    planted("clocks", Outcome::Failed, "# as root on b", |answers| {
        value(answers, "node-leases")[1]["spec"]["renewTime"] = json!("2026-11-25T12:05:00.000000Z");
    });
    planted("clocks", Outcome::Warning, "this machine", |answers| answers.ahead = -60);
}

/// The API server records when a Lease was written, so that a slow clock and a Lease that is no longer renewed differ.
#[test]
fn clock_that_is_behind_is_reported() {
    let written = |time: &str| {
        json!([
            {"manager": "other", "time": "2026-11-25T11:00:00Z", "fieldsV1": {"f:metadata": {}}},
            {"manager": "kubelet", "time": time, "fieldsV1": {"f:spec": {"f:renewTime": {}}}},
        ])
    };
    planted("clocks", Outcome::Failed, "timedatectl set-ntp true", |answers| {
        let lease = &mut value(answers, "node-leases")[0];
        lease["spec"]["renewTime"] = json!("2026-11-25T11:54:57.000000Z");
        lease["metadata"]["managedFields"] = written("2026-11-25T11:59:57Z");
    });
    planted("clocks", Outcome::Failed, "# as root on x", |answers| {
        value(answers, "leases")[0]["metadata"]["managedFields"] = written("2026-11-25T11:58:57Z");
    });
    let mut answers = healthy();
    let lease = &mut value(&mut answers, "node-leases")[0];
    lease["spec"]["renewTime"] = json!("2026-11-25T11:00:00.500000Z");
    lease["metadata"]["managedFields"] = written("2026-11-25T11:00:01Z");
    assert!(all(&answers, Some(&good_config())).iter().all(|report| report.outcome == Outcome::Passed));
}

#[test]
fn unread_metrics_are_reported() {
    planted("metrics", Outcome::Warning, "gantry.dev/metrics=true", |answers| {
        *value(answers, "namespaces") = json!([]);
    });
    planted("metrics", Outcome::Warning, "monitoring.podMonitor.enabled=true", |answers| {
        *answers.answer("pod-monitors") = Answer::Found(json!([]));
    });
}

#[test]
fn full_memory_is_reported() {
    let with = |line: &'static str| {
        move |answers: &mut Answers| {
            let page = value(answers, "metrics/gantry-extender-1");
            *page = json!(format!("{}{line}", page.as_str().unwrap()));
        }
    };
    planted(
        "memory",
        Outcome::Warning,
        "--object-memory",
        with("gantry_extender_object_bytes{namespace=\"big\"} 140000\n"),
    );
    planted(
        "memory",
        Outcome::Failed,
        "--object-memory",
        with("gantry_extender_refused_objects{namespace=\"big\"} 2\n"),
    );
}

/// A doctor with fewer rights reports what it cannot read, and still the rest.
#[test]
fn unreadable_answers_are_not_failures() {
    let mut answers = healthy();
    *answers.answer("nodes") = Answer::Unreadable("nodes is forbidden".to_owned());
    let reports = all(&answers, Some(&good_config()));
    let unknown: Vec<&str> = reports
        .iter()
        .filter(|report| report.outcome == Outcome::Unknown)
        .map(|report| report.check)
        .collect();
    assert_eq!(unknown, ["gpu-nodes", "other-plugin", "mig", "labels"]);
    assert!(reports.iter().all(|report| report.outcome != Outcome::Failed));
}

/// A new check needs a fault here, and one in a real cluster (`tests/tests/helm/faults.rs`).
#[test]
fn every_check_has_a_planted_fault() {
    let tests: String = include_str!("tests.rs").split_whitespace().collect();
    for (check, _) in CHECKS {
        let is_planted = ["planted", "planted_with"]
            .iter()
            .any(|call| tests.contains(&format!("{call}(\"{check}\",Outcome::")));
        assert!(is_planted, "{check}");
    }
}

/// What mends an installation by the manifests is a command for these, not for the chart.
#[test]
fn fix_is_for_the_way_of_the_installation() {
    let mut answers = healthy();
    value(&mut answers, "bindings").as_array_mut().unwrap().clear();
    let fix = |answers: &Answers| {
        let reports = all(answers, Some(&good_config()));
        reports.into_iter().find(|report| report.check == "policies").unwrap().fix.unwrap()
    };
    let chart = "helm upgrade gantry charts/gantry -n gantry-system --reuse-values --set guard.enabled=true";
    assert_eq!(fix(&answers), chart);
    for set in value(&mut answers, "daemonsets").as_array_mut().unwrap() {
        set["metadata"].as_object_mut().unwrap().remove("annotations");
    }
    assert_eq!(fix(&answers), "kubectl apply -f manifests/guard.yaml");
    value(&mut answers, "daemonsets").as_array_mut().unwrap().clear();
    insta::assert_snapshot!(fix(&answers), @"helm upgrade --install gantry charts/gantry -n gantry-system --create-namespace --set guard.enabled=true,image.repository=REGISTRY/gantry");
}

/// Every page that a fix names has the section.
#[test]
fn pages_that_fixes_name_exist() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let source = include_str!("../checks.rs");
    let mut count = 0;
    for link in source.split("docs/").skip(1) {
        let end = link.find(|char: char| !(char.is_ascii_alphanumeric() || "-./#".contains(char))).unwrap();
        let link = link[..end].trim_end_matches('.');
        let (page, section) = link.split_once('#').unwrap_or((link, ""));
        let page = root.join("docs").join(page);
        let text =
            std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        let has_section = text.lines().filter(|line| line.starts_with('#')).any(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
            title.chars().filter(|char| char.is_ascii_alphanumeric() || *char == '-').collect::<String>()
                == section
        });
        assert!(section.is_empty() || has_section, "{link}");
        count += 1;
    }
    assert!(count > 5);
}
