//! Renders of the chart.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use gantry_e2e::components::Components;
use gantry_e2e::gantry::manifests;
use gantry_e2e::helm::{Helm, chart};
use serde_json::{Value, json};

use crate::{NAMESPACE, RELEASE, helms};

/// Objects by kind and name.
type Objects = BTreeMap<(String, String), Value>;

const KUBERNETES: &str = "--kube-version=1.37.1";

/// What `helm template` prints with these values.
fn template(helm: &Helm, values: &[&str]) -> gantry_e2e::Result<String> {
    let chart = chart().display().to_string();
    let mut args = vec!["template", RELEASE, &chart, "--namespace", NAMESPACE, KUBERNETES];
    args.extend(values.iter().flat_map(|value| ["--set", *value]));
    helm.output(None, &args)
}

fn objects(yaml: &str) -> Result<Objects> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml)?;
    let documents = documents.into_iter().filter(|document| !document.is_null());
    let keyed = documents.map(|object| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        ((text(&object["kind"]), text(&object["metadata"]["name"])), object)
    });
    Ok(keyed.collect())
}

pub(crate) fn both_helms_accept_the_chart() -> Result<()> {
    let chart = chart().display().to_string();
    let [three, four] = helms()?;
    for mode in ["none", "own", "existing"] {
        let mode = format!("scheduler.mode={mode}");
        for helm in [&three, &four] {
            helm.output(None, &["lint", "--strict", &chart, KUBERNETES, "--set", &mode])?;
        }
        let [first, second] = [objects(&template(&three, &[&mode])?)?, objects(&template(&four, &[&mode])?)?];
        ensure!(first == second, "{mode}: helm 3 and helm 4 render different objects");
    }
    Ok(())
}

/// The schema names the value, and the chart the reason where a schema cannot.
pub(crate) fn wrong_values_are_refused_by_name() -> Result<()> {
    let wrong: [(&[&str], &str); 27] = [
        (&["scheduler.mode=ohne"], "/scheduler/mode"),
        (&["plugin.label=gfd"], "'label'"),
        (&["plugin.labels=nodes"], "/plugin/labels"),
        (&["plugin.configs.a.flags.migStrategy=mixd"], "/plugin/configs/a/flags/migStrategy"),
        (&["plugin.configs.a.sharing.timeSlicing.resources[0].name=nvidia.com/gpu"], "'replicas'"),
        (&["plugin.kubeletRoot=var/lib"], "/plugin/kubeletRoot"),
        (&["plugin.kubeletConfigFile=config.yaml"], "/plugin/kubeletConfigFile"),
        (&["plugin.maxUnavailable=0"], "/plugin/maxUnavailable"),
        (&["scheduler.own.name=default-scheduler"], "/scheduler/own/name"),
        (&["image.digest=latest"], "/image/digest"),
        (&["extender.resources[0]=a100' || true"], "/extender/resources/0"),
        (&["extender.fabric=zonerack"], "/extender/fabric"),
        (&["extender.fabric=node=example.com/node"], "/extender/fabric"),
        (&["extender.extraArgs[0]=--fabrik=zone"], "/extender/extraArgs/0"),
        (&["plugin.extraArgs[0]=lenient-config"], "/plugin/extraArgs/0"),
        (
            &["scheduler.existing.service.controlPlaneCIDR=10.0.0.0"],
            "/scheduler/existing/service/controlPlaneCIDR",
        ),
        (
            &["plugin.configs.a.version=v1", "plugin.existingConfigMap=b"],
            "plugin.configs and plugin.existingConfigMap",
        ),
        (
            &["scheduler.mode=existing", "scheduler.existing.placement=service"],
            "scheduler.existing.service.controlPlaneCIDR",
        ),
        (
            // The later option counts.
            &["scheduler.mode=own", "scheduler.own.assign.enabled=true"],
            "scheduler.own.assign.enabled needs MutatingAdmissionPolicy",
        ),
        (
            &["scheduler.mode=own", "scheduler.own.assign.enabled=true"],
            "this cluster has v1.33.2: set scheduler.webhook.enabled=true instead",
        ),
        (&["scheduler.webhook.enabled=true"], "/scheduler/mode"),
        (&["scheduler.mode=existing", "scheduler.webhook.enabled=true"], "/scheduler/mode"),
        (
            &["scheduler.mode=own", "scheduler.webhook.enabled=true", "scheduler.own.assign.enabled=true"],
            "/scheduler/own/assign/enabled",
        ),
        (&["scheduler.webhook.failurePolicy=fail"], "/scheduler/webhook/failurePolicy"),
        (&["scheduler.webhook.port=443"], "/scheduler/webhook/port"),
        (&["scheduler.webhook.tlsSecret=mine"], "/scheduler/webhook/caBundle"),
        (&["scheduler.webhook.certManagerCertificate=a/b"], "/scheduler/webhook/certManagerCertificate"),
    ];
    for helm in helms()? {
        for (values, named) in wrong {
            let chart = chart().display().to_string();
            let is_old = named.contains("Mutating") || named.contains("1.33.2");
            let version = if is_old { "--kube-version=1.33.2" } else { KUBERNETES };
            let mut args = vec!["template", RELEASE, &chart, version];
            args.extend(values.iter().flat_map(|value| ["--set", *value]));
            let output = helm.run(None, &args)?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(!output.status.success() && said.contains(named), "{values:?}: {said}");
        }
        let chart = chart().display().to_string();
        let old = helm.run(None, &["template", RELEASE, &chart, "--kube-version=1.29.9"])?;
        let said = String::from_utf8_lossy(&old.stderr);
        ensure!(!old.status.success() && said.contains(">=1.30.0"), "{said}");
    }
    Ok(())
}

/// What the options of the extender accept passes the schema.
pub(crate) fn good_values_of_the_extender_are_accepted() -> Result<()> {
    for helm in helms()? {
        for fabric in ["", "zone-rack", r"zone\,rack=example.com/rack\,nvlink", r"topograph\, aws"] {
            let fabric = format!("extender.fabric={fabric}");
            template(&helm, &["scheduler.mode=own", &fabric, "extender.extraArgs[0]=--bind-timeout=10"])?;
        }
        for network in ["10.0.0.0/24", "fd00:1::/64"] {
            let network = format!("scheduler.existing.service.controlPlaneCIDR={network}");
            template(&helm, &["scheduler.mode=existing", "scheduler.existing.placement=service", &network])?;
        }
    }
    Ok(())
}

/// The default shape has no object of a scheduler.
pub(crate) fn each_shape_has_its_objects() -> Result<()> {
    let [helm, _] = helms()?;
    for (name, values) in [
        ("plugin_alone", &["scheduler.mode=none"][..]),
        ("own", &["scheduler.mode=own", "scheduler.own.assign.enabled=true"]),
        ("own_with_webhook", &["scheduler.mode=own", "scheduler.webhook.enabled=true"]),
        ("existing", &["scheduler.mode=existing"]),
    ] {
        let objects = objects(&template(&helm, values)?)?;
        let lines: Vec<String> = objects.keys().map(|(kind, name)| format!("{kind} {name}")).collect();
        insta::assert_snapshot!(format!("objects_of_shape_{name}"), lines.join("\n"));
    }
    let own = template(&helm, &["scheduler.mode=own", "scheduler.own.assign.enabled=true"])?;
    let own = objects(&own)?;
    let mut text = String::new();
    for (kind, name) in [
        ("ConfigMap", "gantry-scheduler"),
        ("Deployment", "gantry-scheduler"),
        ("MutatingAdmissionPolicy", "gantry-scheduler-name"),
    ] {
        let object = own.get(&(kind.to_owned(), name.to_owned())).context(kind)?;
        text += &format!("---\n{}", serde_saphyr::to_string(object)?);
    }
    insta::assert_snapshot!("own_scheduler", text);
    Ok(())
}

/// The webhook takes the place of the policy, with the same conditions, on every supported Kubernetes.
pub(crate) fn webhook_has_the_rule_of_the_policy() -> Result<()> {
    let [three, four] = helms()?;
    let more = "extender.resources[0]=example.com/a100";
    let values = ["scheduler.mode=own", "scheduler.webhook.enabled=true", more];
    for helm in [&three, &four] {
        let chart = chart().display().to_string();
        let mut args = vec!["template", RELEASE, &chart, "--namespace", NAMESPACE, "--kube-version=1.30.14"];
        args.extend(values.iter().flat_map(|value| ["--set", *value]));
        let mut with_webhook = objects(&helm.output(None, &args)?)?;
        let policy = template(helm, &["scheduler.mode=own", "scheduler.own.assign.enabled=true", more])?;
        let policy = objects(&policy)?;
        let named = |kind: &str, name: &str| (kind.to_owned(), name.to_owned());
        let policy = policy.get(&named("MutatingAdmissionPolicy", "gantry-scheduler-name"));
        let policy = &policy.context("no policy")?["spec"];

        let key = named("MutatingWebhookConfiguration", "gantry-scheduler-name");
        let configuration = with_webhook.get_mut(&key).context("no configuration")?;
        let webhook = &mut configuration["webhooks"][0];
        for field in ["matchConditions", "failurePolicy", "reinvocationPolicy"] {
            ensure!(!policy[field].is_null() && webhook[field] == policy[field], "{field}: {webhook:#}");
        }
        let constraints = &policy["matchConstraints"];
        let labels = "matchLabels";
        ensure!(webhook["namespaceSelector"][labels] == constraints["namespaceSelector"][labels]);
        // The authority is that of the certificate in the Secret.
        let bundle = webhook["clientConfig"]["caBundle"].take();
        let mut text = format!("---\n{}", serde_saphyr::to_string(configuration)?);
        let secret = with_webhook.get(&named("Secret", "gantry-webhook-tls")).context("no Secret")?;
        ensure!(secret["data"]["ca.crt"] == bundle && bundle.is_string(), "{bundle}");
        for (kind, name) in [
            ("Service", "gantry-webhook"),
            ("NetworkPolicy", "gantry-scheduler"),
            ("Deployment", "gantry-scheduler"),
        ] {
            let object = with_webhook.get(&named(kind, name)).context(kind)?;
            text += &format!("---\n{}", serde_saphyr::to_string(object)?);
        }
        insta::assert_snapshot!("own_scheduler_with_webhook", text);
    }
    Ok(())
}

/// With a Secret of the operator none is generated, and the authority is the operator's or cert-manager's to give.
pub(crate) fn webhook_takes_the_secret_of_the_operator() -> Result<()> {
    let [helm, _] = helms()?;
    let values = ["scheduler.mode=own", "scheduler.webhook.enabled=true", "scheduler.webhook.tlsSecret=mine"];
    let pem = "-----BEGIN CERTIFICATE-----";
    let bundle = ("caBundle", "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0t");
    let inject = ("certManagerCertificate", "gantry-system/webhook");
    for (value, expected, annotation) in
        [((bundle.0, pem), json!(bundle.1), json!(null)), (inject, json!(null), json!(inject.1))]
    {
        let given = format!("scheduler.webhook.{}={}", value.0, value.1);
        let cidr = "scheduler.webhook.controlPlaneCIDR=10.0.0.0/24";
        let objects = objects(&template(&helm, &[&values[..], &[&given, cidr]].concat())?)?;
        let object = |kind: &str, name: &str| {
            objects.get(&(kind.to_owned(), name.to_owned())).with_context(|| format!("no {kind} {name}"))
        };
        ensure!(!objects.keys().any(|(kind, _)| kind == "Secret"), "a Secret is generated");
        let configuration = object("MutatingWebhookConfiguration", "gantry-scheduler-name")?;
        let clients = &configuration["webhooks"][0]["clientConfig"];
        ensure!(clients["caBundle"] == expected, "{clients}");
        let found = &configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"];
        ensure!(*found == annotation, "{found}");
        let volumes = &object("Deployment", "gantry-scheduler")?["spec"]["template"]["spec"]["volumes"];
        let volume = json!({"name": "webhook", "secret": {"secretName": "mine"}});
        ensure!(volumes.as_array().is_some_and(|volumes| volumes.contains(&volume)), "{volumes}");
        let ingress = &object("NetworkPolicy", "gantry-scheduler")?["spec"]["ingress"];
        let rule = json!({"from": [{"ipBlock": {"cidr": "10.0.0.0/24"}}],
            "ports": [{"protocol": "TCP", "port": "webhook"}]});
        ensure!(ingress.as_array().is_some_and(|rules| rules.contains(&rule)), "{ingress}");
    }
    Ok(())
}

/// Every value that shapes a pod changes it, in both DaemonSets.
pub(crate) fn values_reach_the_pods() -> Result<()> {
    let [helm, _] = helms()?;
    let rendered = template(
        &helm,
        &[
            "image.repository=registry.example/gantry",
            "image.tag=1.2.3",
            "image.pullPolicy=Always",
            "image.pullSecrets[0].name=pull",
            "plugin.configs.default.flags.migStrategy=mixed",
            "plugin.configs.default.sharing.timeSlicing.resources[0].name=nvidia.com/gpu",
            "plugin.configs.default.sharing.timeSlicing.resources[0].replicas=4",
            "plugin.defaultConfig=default",
            "plugin.labels=gfd",
            "plugin.podMetrics=true",
            "plugin.ncclTopology=true",
            "plugin.dcgmMetrics=true",
            "plugin.kubeletRoot=/data/kubelet/",
            "plugin.kubeletConfigFile=/data/kubelet/config.yaml",
            "plugin.driverRoot=/run/nvidia/driver",
            "plugin.runtimeClassName=nvidia",
            "plugin.readPods=kubelet-credential",
            "plugin.nodeSelector.pool=gpu",
            "plugin.tolerations[0].key=gpu",
            "plugin.tolerations[0].operator=Exists",
            "plugin.maxUnavailable=1",
            "plugin.podAnnotations.team=ml",
            "plugin.resources.limits.memory=128Mi",
            "plugin.seLinuxOptions.type=spc_t",
            "plugin.extraArgs[0]=--lenient-config",
            "plugin.extraEnv[0].name=RUST_LOG",
            "plugin.extraEnv[0].value=debug",
        ],
    )?;
    let objects = objects(&rendered)?;
    ensure!(!objects.contains_key(&("ClusterRole".to_owned(), "gantry-plugin-pods".to_owned())));
    let mut text = String::new();
    for (kind, name) in [
        ("ConfigMap", "gantry-plugin-config"),
        ("DaemonSet", "gantry-plugin"),
        ("DaemonSet", "gantry-plugin-mig"),
    ] {
        let object = objects.get(&(kind.to_owned(), name.to_owned())).context(kind)?;
        text += &format!("---\n{}", serde_saphyr::to_string(object)?);
    }
    insta::assert_snapshot!("plugin_with_every_value", text);
    Ok(())
}

/// The web page is off, and on loopback where it is on.
pub(crate) fn page_is_off_by_default_and_on_loopback() -> Result<()> {
    let [helm, _] = helms()?;
    for shape in ["scheduler.mode=own", "scheduler.mode=existing"] {
        let off = template(&helm, &[shape])?;
        ensure!(!off.contains("--page-listen"), "{shape}: the page is on");
        let on = template(
            &helm,
            &[shape, "extender.page.enabled=true", "extender.page.hosts[0]=gpus.example.com"],
        )?;
        ensure!(
            on.contains("--page-listen=127.0.0.1:8012\",\"--page-host=gpus.example.com"),
            "{shape}: {on}"
        );
        ensure!(!on.contains("name: page"), "{shape}: a Service has the page on loopback");
    }
    Ok(())
}

/// On an address of the pod, the page has a port of the Service, and the policies admit the namespace of its proxy.
pub(crate) fn page_on_the_network_has_port_and_policy() -> Result<()> {
    let [helm, _] = helms()?;
    let page = ["extender.page.enabled=true", "extender.page.listen=:8443"];
    let service =
        ["scheduler.existing.placement=service", "scheduler.existing.service.controlPlaneCIDR=10.0.0.0/24"];
    for (shape, more, policy) in [
        ("scheduler.mode=own", &[][..], Some("gantry-scheduler")),
        ("scheduler.mode=existing", &service[..], Some("gantry-extender")),
        ("scheduler.mode=existing", &[][..], None),
    ] {
        let values: Vec<&str> = [shape].iter().chain(&page).chain(more).copied().collect();
        let objects = objects(&template(&helm, &values)?)?;
        let object = |kind: &str, name: &str| {
            let found = objects.get(&(kind.to_owned(), name.to_owned()));
            found.with_context(|| format!("{shape} {more:?}: no {kind} {name}"))
        };
        let port = json!({"name": "page", "port": 8443, "targetPort": "page"});
        let ports = &object("Service", "gantry-extender")?["spec"]["ports"];
        ensure!(ports.as_array().is_some_and(|ports| ports.contains(&port)), "{shape}: {ports}");
        if let Some(policy) = policy {
            let admitted = json!({"from": [{"namespaceSelector": {"matchLabels": {"gantry.dev/page": "true"}}}],
                "ports": [{"protocol": "TCP", "port": "page"}]});
            let ingress = &object("NetworkPolicy", policy)?["spec"]["ingress"];
            ensure!(ingress.as_array().is_some_and(|rules| rules.contains(&admitted)), "{shape}: {ingress}");
        }
        let declares = |object: &Value| object.to_string().contains("\"containerPort\":8443");
        ensure!(
            objects.values().filter(|object| declares(object)).count() == 1,
            "{shape}: no port of a container"
        );
    }
    Ok(())
}

/// The policies that restrict the extender to pods of Gantry know the resources of other domains.
pub(crate) fn policies_know_further_resources() -> Result<()> {
    let [helm, _] = helms()?;
    let values = ["scheduler.mode=own", "extender.restart=true", "scheduler.own.assign.enabled=true"];
    let count = |values: &[&str]| -> Result<usize> {
        Ok(template(&helm, values)?.matches("|| name == 'example.com/a100')").count())
    };
    ensure!(count(&values)? == 0);
    let with = [&values[..], &["extender.resources[0]=example.com/a100"]].concat();
    let found = count(&with)?;
    ensure!(found == 5, "two in each of two policies and one in a third, found {found}");
    Ok(())
}

/// The objects for Prometheus' operator and Grafana's sidecar have the files of the chart, with complete links.
pub(crate) fn rules_and_dashboards_are_those_of_the_files() -> Result<()> {
    let [helm, _] = helms()?;
    let on = [
        "monitoring.rules.enabled=true",
        "monitoring.rules.runbooks=https://example.com/",
        "monitoring.rules.prices.L4=0.5",
        "monitoring.dashboards.enabled=true",
    ];
    let objects = objects(&template(&helm, &on)?)?;
    let rule = objects.get(&("PrometheusRule".to_owned(), "gantry".to_owned())).context("no rule")?;
    let alerts = std::fs::read_to_string(chart().join("files/alerts.yaml"))?;
    let alerts = alerts.replace("runbook_url: runbooks.md", "runbook_url: https://example.com/runbooks.md");
    let mut expected: Value = serde_saphyr::from_str(&alerts)?;
    let prices = json!({"name": "gantry-prices", "rules": [
        {"record": "gantry:gpu_price:per_hour", "expr": "vector(0.5)", "labels": {"model": "L4"}},
    ]});
    expected["groups"].as_array_mut().context("groups")?.push(prices);
    ensure!(rule["spec"] == expected, "{rule}");
    for file in std::fs::read_dir(chart().join("files/dashboards"))? {
        let path = file?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).context("a name")?;
        let map = objects.get(&("ConfigMap".to_owned(), name.to_owned())).context("no ConfigMap")?;
        let board = map["data"][format!("{name}.json")].as_str();
        ensure!(board == Some(&std::fs::read_to_string(&path)?), "{name}");
    }
    Ok(())
}

/// What `gantry migrate` prints for installations of NVIDIA's plugin is accepted by the chart's schema.
pub(crate) fn migrated_values_are_accepted() -> Result<()> {
    let gantry = gantry_e2e::gantry::binary().context("no gantry beside this test: cargo build -p gantry")?;
    let [helm, _] = helms()?;
    let chart = chart().display().to_string();
    let folder = tempfile::tempdir()?;
    for sample in ["plugin-values", "cluster-policy", "daemonset"] {
        let path = manifests().join(format!("../cli/src/migrate/samples/{sample}.yaml"));
        let output = std::process::Command::new(&gantry).arg("migrate").arg(path).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let values = folder.path().join(sample);
        std::fs::write(&values, &output.stdout)?;
        let values = values.display().to_string();
        helm.output(None, &["template", RELEASE, &chart, KUBERNETES, "--values", &values])?;
    }
    Ok(())
}

/// `kubectl apply -k` and the chart install the same objects.
pub(crate) fn kustomizations_equal_the_chart() -> Result<()> {
    let kubectl = Components::locate_or_build()?.path("kubectl");
    let [helm, _] = helms()?;
    let kustomize = |folder: &std::path::Path| -> Result<Objects> {
        let output = std::process::Command::new(&kubectl).arg("kustomize").arg(folder).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut objects = objects(&String::from_utf8(output.stdout)?)?;
        // helm makes the namespace by --create-namespace.
        ensure!(objects.remove(&("Namespace".to_owned(), NAMESPACE.to_owned())).is_some(), "no namespace");
        Ok(objects)
    };
    let rendered = |values: &[&str]| -> Result<Objects> {
        let mut objects = objects(&template(&helm, values)?)?;
        for crd in objects.values_mut().filter(|object| object["kind"] == "CustomResourceDefinition") {
            // Only helm knows a policy for uninstalling.
            let metadata = crd["metadata"].as_object_mut().context("no metadata")?;
            ensure!(metadata.remove("annotations") == Some(json!({"helm.sh/resource-policy": "keep"})));
        }
        Ok(objects)
    };
    same(&kustomize(&manifests())?, &rendered(&["scheduler.mode=existing"])?)?;
    for (overlay, mode) in [("plugin-alone", "none"), ("own", "own"), ("existing", "existing")] {
        let kustomized = kustomize(&manifests().join("overlays").join(overlay))?;
        same(&kustomized, &rendered(&[&format!("scheduler.mode={mode}")])?).context(overlay)?;
    }

    let folder = tempfile::tempdir()?;
    let here = folder.path().canonicalize()?;
    // kustomize takes relative paths only.
    let up = "../".repeat(here.components().count() - 1);
    let base = format!("{up}{}", manifests().canonicalize()?.display().to_string().trim_start_matches('/'));
    let overlay = json!({ "resources": [&base], "components": [format!("{base}/kubelet-credential")] });
    std::fs::write(here.join("kustomization.yaml"), overlay.to_string())?;
    same(&kustomize(&here)?, &rendered(&["scheduler.mode=existing", "plugin.readPods=kubelet-credential"])?)
}

fn same(kustomized: &Objects, rendered: &Objects) -> Result<()> {
    let names = |objects: &Objects| objects.keys().cloned().collect::<Vec<_>>();
    ensure!(names(kustomized) == names(rendered), "{:?}\nand\n{:?}", names(kustomized), names(rendered));
    for (name, object) in kustomized {
        let other = &rendered[name];
        ensure!(object == other, "{name:?}:\n{object:#}\nand\n{other:#}");
    }
    Ok(())
}
