//! The metrics of the GPUs against the simulated library: values, units and labels; GPUs that fail, hang or are lost.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gantry_config::Config;
use gantry_nvml_sim::control::{Activity, Ecc, Process};
use gantry_plugin::telemetry::{Field, Labels, SamplerSource, SamplerTiming, Samples, exposition, read_once};
use sim::Sim;
use support::probes::{a_moment, awaited, get};
use support::{Node, soon};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Short intervals, so that tests are short.
const QUICK: SamplerTiming = SamplerTiming {
    interval: Duration::from_millis(30),
    first: Duration::from_millis(10),
    hung_after: Duration::from_millis(300),
};

/// A sampler of a machine.
struct Sampler {
    samples: Samples,
    shutdown: CancellationToken,
}

impl Sampler {
    fn of(sim: &Sim) -> Self {
        let samples = Samples::new(QUICK);
        let shutdown = CancellationToken::new();
        let (_, config) = watch::channel(Arc::new(Config::default()));
        let source = SamplerSource { library: sim.installed.library.clone(), config };
        tokio::spawn(samples.clone().run(source, shutdown.clone()));
        Self { samples, shutdown }
    }

    fn text(&self, sim: &Sim) -> String {
        let labels = Labels { host: "node-1", machine: sim.installed.facts.machine(), holders: None };
        exposition(&self.samples.now(), &labels, None)
    }

    /// Waits until the text fulfils a condition.
    async fn until(&self, sim: &Sim, what: &str, condition: impl Fn(&str) -> bool) -> String {
        soon(what, async {
            loop {
                let text = self.text(sim);
                if condition(&text) {
                    return text;
                }
                a_moment().await;
            }
        })
        .await
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// The values of a metric by a label.
fn values(text: &str, metric: &str, label: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter_map(|line| line.strip_prefix(metric)?.strip_prefix('{'));
    lines
        .filter_map(|line| {
            let (labels, value) = line.rsplit_once("} ")?;
            let start = labels.find(&format!("{label}=\""))? + label.len() + 2;
            Some((labels[start..].split('"').next()?.to_owned(), value.parse().ok()?))
        })
        .collect()
}

fn near(value: f64, expected: f64) -> bool {
    (value - expected).abs() < 1e-9
}

#[tokio::test(flavor = "multi_thread")]
async fn hopper_gpu_has_all_metrics_in_dcgm_units() {
    let sim = Sim::of("hgx-h100");
    let control = &sim.installed.controller;
    control.set_temperature(2, 61).unwrap();
    control.set_utilization(2, 80).unwrap();
    control.set_processes(2, vec![Process { pid: 7, memory_mib: 4096, ..Process::default() }]).unwrap();
    let activity = Activity {
        sm_active: Some(70),
        sm_occupancy: Some(25),
        tensor_active: Some(40),
        dram_active: Some(55),
        pcie_sent: Some(100),
        pcie_received: Some(200),
        nvlink_sent: Some(3000),
        nvlink_received: Some(4000),
        encoder: Some(3),
        decoder: Some(4),
    };
    control.set_activity(2, None, activity).unwrap();
    control
        .update_gpu(2, |gpu| {
            gpu.ecc = Ecc { volatile_corrected: 5, aggregate_uncorrected: 1, ..Ecc::default() };
            gpu.link_errors = [(0, 2), (3, 4)].into();
            gpu.pcie_replays = 9;
            gpu.sm_clock = Some(1200);
            gpu.remapped.corrected = 6;
        })
        .unwrap();
    let sampler = Sampler::of(&sim);
    let text =
        sampler.until(&sim, "profiling metrics", |text| text.contains("DCGM_FI_PROF_SM_ACTIVE{")).await;
    let mib = 1_048_576.0;
    for (metric, expected) in [
        ("DCGM_FI_DEV_GPU_TEMP", 61.0),
        ("DCGM_FI_DEV_MEMORY_TEMP", 61.0),
        ("DCGM_FI_DEV_GPU_UTIL", 80.0),
        ("DCGM_FI_DEV_MEM_COPY_UTIL", 40.0),
        ("DCGM_FI_DEV_ENC_UTIL", 3.0),
        ("DCGM_FI_DEV_DEC_UTIL", 4.0),
        ("DCGM_FI_DEV_FB_USED", 4096.0),
        ("DCGM_FI_DEV_FB_TOTAL", 81_559.0),
        ("DCGM_FI_DEV_FB_RESERVED", 815.0),
        ("DCGM_FI_DEV_FB_FREE", 81_559.0 - 4096.0 - 815.0),
        ("DCGM_FI_DEV_SM_CLOCK", 1200.0),
        ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", 5.0),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0.0),
        ("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", 1.0),
        ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", 6.0),
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE", 0.0),
        ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 9.0),
        ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 6.0),
        ("DCGM_FI_DEV_POWER_MGMT_LIMIT", 700.0),
        ("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", 104_858.0),
        ("DCGM_FI_DEV_PCIE_RX_THROUGHPUT", 209_715.0),
        ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", 7000.0),
        ("DCGM_FI_PROF_SM_ACTIVE", 0.7),
        ("DCGM_FI_PROF_SM_OCCUPANCY", 0.25),
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0.4),
        ("DCGM_FI_PROF_DRAM_ACTIVE", 0.55),
        ("DCGM_FI_PROF_PCIE_TX_BYTES", 100.0 * mib),
        ("DCGM_FI_PROF_PCIE_RX_BYTES", 200.0 * mib),
        ("DCGM_FI_PROF_NVLINK_TX_BYTES", 3000.0 * mib),
        ("DCGM_FI_PROF_NVLINK_RX_BYTES", 4000.0 * mib),
    ] {
        let found = values(&text, metric, "gpu");
        assert!(near(found["2"], expected), "{metric}: {} is not {expected}", found["2"]);
        assert_eq!(found.len(), 8, "{metric}");
    }
    // A tenth of the limit at rest, and the rest in proportion to the load.
    assert!(near(values(&text, "DCGM_FI_DEV_POWER_USAGE", "gpu")["2"], 700.0 * (0.1 + 0.9 * 0.8)));
    for missing in ["DCGM_FI_DEV_RETIRED_SBE", "DCGM_FI_DEV_XID_ERRORS", "GPU_I_ID", "pod="] {
        assert!(!text.contains(missing), "{missing}");
    }
    let (uuid, driver) = (sim.uuid(2), &sim.installed.facts.driver);
    let bus = sim.installed.facts.gpus[2].address.nvml();
    let line = format!(
        "DCGM_FI_DEV_GPU_TEMP{{gpu=\"2\",UUID=\"{uuid}\",pci_bus_id=\"{bus}\",device=\"nvidia2\",\
         modelName=\"NVIDIA H100 80GB HBM3\",Hostname=\"node-1\",DCGM_FI_DRIVER_VERSION=\"{driver}\"}} 61"
    );
    assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    assert!(text.contains("# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter\n"));
    let energy = values(&text, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "gpu")["2"];
    sampler
        .until(&sim, "more energy", |text| {
            values(text, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "gpu")["2"] > energy
        })
        .await;
}

/// Values of a GPU instance are its own; those of the board stand once, without an instance.
#[tokio::test(flavor = "multi_thread")]
async fn gpu_instances_have_their_own_memory_and_profile() {
    let sim = Sim::of("hgx-h100-mig");
    let gpus = &sim.installed.facts.gpus;
    let cut = gpus.iter().find(|gpu| gpu.mig.as_ref().is_some_and(|mig| mig.instances.len() > 1)).unwrap();
    let instances = &cut.mig.as_ref().unwrap().instances;
    let instance = &instances[0];
    let index = u8::try_from(cut.index).unwrap();
    let activity = Activity { sm_active: Some(90), ..Activity::default() };
    sim.installed.controller.set_activity(index, Some(instance.id), activity).unwrap();
    let sampler = Sampler::of(&sim);
    let active = |text: &str| text.contains("DCGM_FI_PROF_SM_ACTIVE{");
    let text = sampler.until(&sim, "profiling metrics", active).await;
    let of_gpu: String =
        text.lines().filter(|line| line.contains(&cut.uuid)).map(|line| format!("{line}\n")).collect();
    let by_instance = values(&of_gpu, "DCGM_FI_PROF_SM_ACTIVE", "GPU_I_ID");
    assert_eq!(by_instance.len(), instances.len());
    assert!(near(by_instance[&instance.id.to_string()], 0.9));
    assert!(by_instance.values().filter(|value| near(**value, 0.0)).count() == instances.len() - 1);
    let profiles = values(&of_gpu, "DCGM_FI_DEV_FB_TOTAL", "GPU_I_PROFILE");
    assert!(profiles.contains_key(&instance.profile), "{profiles:?}");
    assert!(values(&of_gpu, "DCGM_FI_DEV_GPU_TEMP", "GPU_I_ID").is_empty());
    assert_eq!(values(&of_gpu, "DCGM_FI_DEV_GPU_TEMP", "gpu").len(), 1);
    assert!(!of_gpu.contains("DCGM_FI_DEV_GPU_UTIL"), "NVML does not know it in MIG mode");
}

/// Before Hopper there are no profiling metrics; traffic comes from other counters under the same names.
#[tokio::test(flavor = "multi_thread")]
async fn ampere_gpu_has_traffic_and_no_profile() {
    let sim = Sim::of("dgx-a100");
    let activity = Activity {
        pcie_sent: Some(125),
        nvlink_sent: Some(1000),
        nvlink_received: Some(2000),
        ..Activity::default()
    };
    sim.installed.controller.set_activity(0, None, activity).unwrap();
    let sampler = Sampler::of(&sim);
    let links = |text: &str| values(text, "DCGM_FI_PROF_NVLINK_RX_BYTES", "gpu").get("0").copied();
    let text = sampler.until(&sim, "a rate", |text| links(text).is_some_and(|rate| rate > 0.0)).await;
    assert!(!text.contains("DCGM_FI_PROF_SM_ACTIVE"));
    assert!(near(values(&text, "DCGM_FI_PROF_PCIE_TX_BYTES", "gpu")["0"], 131_072_000.0));
    assert!(near(values(&text, "DCGM_FI_DEV_PCIE_TX_THROUGHPUT", "gpu")["0"], 131_072.0));
    let sum = values(&text, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "gpu")["0"];
    let sent = values(&text, "DCGM_FI_PROF_NVLINK_TX_BYTES", "gpu")["0"];
    assert!(near(sum, ((sent + links(&text).unwrap()) / 1_048_576.0).round()), "{sum} of {sent}");
    let rate = links(&text).unwrap() / 1_048_576.0;
    assert!((1000.0..3000.0).contains(&rate), "{rate} MiB/s; the interval of a test is short");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_call_leaves_out_its_value_only() {
    let sim = Sim::of("hgx-h100");
    let unknown = 999;
    sim.installed.controller.fail_call_on(1, "nvmlDeviceGetTemperature", unknown).unwrap();
    let sampler = Sampler::of(&sim);
    let text =
        sampler.until(&sim, "samples", |text| text.contains("DCGM_FI_DEV_POWER_USAGE{gpu=\"7\"")).await;
    let temperatures = values(&text, "DCGM_FI_DEV_GPU_TEMP", "gpu");
    assert!(temperatures.len() == 7 && !temperatures.contains_key("1"), "{temperatures:?}");
    assert_eq!(values(&text, "DCGM_FI_DEV_POWER_USAGE", "gpu").len(), 8);
}

/// One lost GPU, then the whole driver: values end, and return with what they are read from.
#[tokio::test(flavor = "multi_thread")]
async fn lost_gpu_and_missing_driver_have_no_values() {
    let sim = Sim::of("hgx-h100");
    let control = &sim.installed.controller;
    let sampler = Sampler::of(&sim);
    let count = |text: &str| values(text, "DCGM_FI_DEV_GPU_TEMP", "gpu").len();
    sampler.until(&sim, "all GPUs", |text| count(text) == 8).await;
    control.lose_gpu(3).unwrap();
    let text = sampler.until(&sim, "the loss", |text| count(text) == 7).await;
    assert!(!text.contains(sim.uuid(3)));
    control.restore_gpu(3).unwrap();
    sampler.until(&sim, "the GPU's return", |text| count(text) == 8).await;
    control.unload_driver().unwrap();
    sampler.until(&sim, "no values", str::is_empty).await;
    control.load_driver().unwrap();
    sampler.until(&sim, "the driver's return", |text| count(text) == 8).await;
}

/// Each hanging GPU keeps one thread; the others are read by a new one, and all by the last one in the end.
#[tokio::test(flavor = "multi_thread")]
async fn hanging_gpus_do_not_stop_the_others() {
    let sim = Sim::of("hgx-h100");
    let control = &sim.installed.controller;
    let sampler = Sampler::of(&sim);
    let read = |text: &str| values(text, "DCGM_FI_DEV_POWER_USAGE", "gpu");
    sampler.until(&sim, "all GPUs", |text| read(text).len() == 8).await;
    for gpu in [0, 5] {
        control.hang_call_on(gpu, "nvmlDeviceGetPowerUsage").unwrap();
    }
    control.set_temperature(7, 77).unwrap();
    let text = sampler.until(&sim, "the GPUs that respond", |text| read(text).len() == 6).await;
    assert!(!read(&text).contains_key("0") && !read(&text).contains_key("5"));
    assert!(near(values(&text, "DCGM_FI_DEV_GPU_TEMP", "gpu")["7"], 77.0));
    let calls = control.calls();
    let oldest = sampler.samples.ages().into_iter().map(|(_, age)| age).max().unwrap();
    assert!(oldest > QUICK.hung_after, "{oldest:?}");
    soon("more rounds", async {
        while control.calls().since(&calls).of("nvmlDeviceGetTotalEnergyConsumption") < 60 {
            a_moment().await;
        }
    })
    .await;
    // The hanging GPUs are not read again meanwhile, so no further thread hangs.
    assert_eq!(control.calls().since(&calls).of("nvmlInit_v2"), 0);
    control.clear_rule("nvmlDeviceGetPowerUsage").unwrap();
    sampler.until(&sim, "all GPUs again", |text| read(text).len() == 8).await;
}

/// The whole daemon: a GPU that hangs for its metrics is allocated and healthy, and pods are named on request only.
#[tokio::test(flavor = "multi_thread")]
async fn daemon_serves_metrics_and_health_ignores_a_hang() {
    let sim = Sim::of("workstation-2x");
    sim.installed.controller.hang_call_on(0, "nvmlDeviceGetTotalEnergyConsumption").unwrap();
    let mut node = Node::new(0);
    let listen = node.listen();
    let node = node.with(|args| {
        sim.use_in(args);
        args.dcgm_metrics = true;
    });
    let _kubelet = node.kubelet();
    let shutdown = CancellationToken::new();
    let daemon = tokio::spawn(gantry_plugin::run(node.args().clone(), shutdown.clone()));
    let (_, text) = awaited(listen, "/metrics/dcgm", "DCGM_FI_DEV_GPU_TEMP{gpu=\"1\"").await;
    assert!(!text.contains("gpu=\"0\""), "{text}");
    assert!(text.contains("Hostname=\"node-1\"") && text.contains("DCGM_FI_DEV_XID_ERRORS{"), "{text}");
    sim.installed.controller.raise_xid(1, 31).unwrap();
    let xid = "err_code=\"31\",err_msg=\"Xid 31: GPU memory page fault\"} 31";
    awaited(listen, "/metrics/dcgm", xid).await;
    let (_, metrics) = get(listen, "/metrics").await;
    assert!(metrics.contains(&format!("gpu_sample_age_seconds{{gpu=\"{}\"}}", sim.uuid(1))), "{metrics}");
    assert!(!metrics.contains("gantry_plugin_gpu_unhealthy{"), "{metrics}");
    let (code, ready) = get(listen, "/readyz").await;
    assert_eq!(code, 200, "{ready}");
    sim.installed.controller.clear_rule("nvmlDeviceGetTotalEnergyConsumption").unwrap();
    shutdown.cancel();
    soon("the daemon's end", daemon).await.unwrap().unwrap();
}

#[test]
fn one_reading_has_rates_and_names_what_fails() {
    let sim = Sim::of("hgx-h100");
    sim.installed.controller.set_utilization(0, 50).unwrap();
    let (text, problems) = read_once(&sim.options(), "here", Duration::from_millis(150)).unwrap();
    assert_eq!(problems, Vec::<String>::new());
    assert!(values(&text, "DCGM_FI_PROF_SM_ACTIVE", "gpu")["0"] > 0.4, "{text}");
    sim.installed.controller.lose_gpu(6).unwrap();
    let (text, problems) = read_once(&sim.options(), "here", Duration::from_millis(10)).unwrap();
    assert_eq!(values(&text, "DCGM_FI_DEV_GPU_TEMP", "gpu").len(), 7);
    insta::assert_snapshot!(problems.join("\n"), @"GPU 6 cannot be read: nvmlDeviceGetHandleByIndex_v2 on GPU 6 failed: the GPU has fallen off the bus; look for an Xid in dmesg, then reboot the node or check the board's power and seating");
}

/// What dcgm-exporter 4.8.2 and DCGM serve, as a table of our own.
const DCGM_FIELDS: &str = include_str!("dcgm-fields.csv");

/// A row of the table: name, type, list, labels of its own, reason for which Gantry does not serve it.
fn dcgm_fields() -> BTreeMap<&'static str, [&'static str; 4]> {
    let lines = DCGM_FIELDS.lines().filter(|line| !line.starts_with('#'));
    let rows = lines.map(|line| {
        let cells: Vec<&str> = line.splitn(5, ',').map(str::trim).collect();
        let [name, kind, list, labels, reason] = cells[..] else { panic!("{line}: five cells") };
        assert!(["default", "earlier", "optional", "dcgm"].contains(&list), "{line}");
        assert!(["gauge", "counter"].contains(&kind), "{line}");
        (name, [kind, list, labels, reason])
    });
    rows.collect()
}

/// Names and types are dcgm-exporter's; the help texts are Gantry's own.
#[test]
fn served_fields_have_names_and_types_of_dcgm() {
    let fields = dcgm_fields();
    let served: BTreeMap<&str, &str> = Field::ALL.iter().map(|field| (field.name(), field.kind())).collect();
    assert_eq!(served.len(), Field::ALL.len(), "a name stands twice");
    for (name, kind) in &served {
        let [known, _, _, reason] = fields.get(name).unwrap_or_else(|| panic!("DCGM has no {name}"));
        assert_eq!(known, kind, "{name}");
        assert!(reason.is_empty(), "{name} is served, and has a reason not to be");
    }
}

/// What is not served has a reason, and docs/metrics.md names it.
#[test]
fn fields_that_are_not_served_are_documented() {
    let documented = include_str!("../../docs/metrics.md");
    for (name, [_, _, _, reason]) in dcgm_fields() {
        let is_served = Field::ALL.iter().any(|field| field.name() == name);
        assert!(is_served || !reason.is_empty(), "{name} is not served, without a reason");
        assert!(documented.contains(&format!("`{name}`")), "docs/metrics.md does not name {name}");
    }
}

/// Every series has the labels that dcgm-exporter gives, in its order, and those of its field.
#[tokio::test(flavor = "multi_thread")]
async fn series_have_the_labels_of_dcgm() {
    let fields = dcgm_fields();
    for machine in ["hgx-h100-mig", "dgx-a100"] {
        let sim = Sim::of(machine);
        let sampler = Sampler::of(&sim);
        let rate = |text: &str| text.contains("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{");
        sampler.until(&sim, "rates", rate).await;
        let labels = Labels { host: "node-1", machine: sim.installed.facts.machine(), holders: None };
        let text = exposition(&sampler.samples.now(), &labels, Some(&BTreeMap::new()));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, rest) = line.split_once('{').unwrap();
            let found: Vec<&str> =
                rest.split("\",").chain([""]).filter_map(|part| Some(part.split_once('=')?.0)).collect();
            let mut expected = vec!["gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname"];
            expected.push("DCGM_FI_DRIVER_VERSION");
            if rest.contains("GPU_I_ID") {
                expected.extend(["GPU_I_PROFILE", "GPU_I_ID"]);
            }
            expected.extend(fields[name][2].split_whitespace());
            assert_eq!(found, expected, "{line}");
        }
    }
}
