use gantry_api::MAX_MESSAGE;
use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};

use super::*;
use crate::observe::{Configuration, Registration};

/// A machine of `GPU-0` and `GPU-1`.
fn two_gpus() -> Arc<Machine> {
    let gpus: Vec<Gpu> = (0..2)
        .map(|index| Gpu { index, uuid: Some(format!("GPU-{index}").parse().unwrap()), ..Gpu::default() })
        .collect();
    let machine = Machine::new(MachineParts {
        paths: PathMatrix::from_fn(2, |_, _| PathClass::Sys),
        gpus,
        ..MachineParts::default()
    });
    Arc::new(machine.unwrap())
}

fn readiness(devices: Option<&str>) -> Readiness {
    Readiness {
        devices: devices.map(str::to_owned),
        registered: [("nvidia.com/gpu".into(), Registration::Accepted)].into(),
        cluster: Some(true),
        pod_resources: Some(true),
        config: Configuration::InEffect,
        ..Readiness::default()
    }
}

#[test]
fn condition_message_is_truncated() {
    let inventory = Inventory {
        problems: (0..10_000).map(|at| format!("devices.deny[{at}] means nothing")).collect(),
        ..Inventory::ready(crate::inventory::Hardware::starting().machine, Vec::new())
    };
    let condition = ready(&inventory, &readiness(None), true, None, Timestamp::UNIX_EPOCH);
    assert!(condition.message.len() <= MAX_MESSAGE, "{} bytes", condition.message.len());
}

#[test]
fn unchanged_condition_keeps_its_time() {
    let (early, late) = (Timestamp::from_second(1).unwrap(), Timestamp::from_second(2).unwrap());
    let first = GpuNodeStatus {
        conditions: vec![ready(&Inventory::starting(), &readiness(None), true, None, early)],
        ..GpuNodeStatus::default()
    };
    let second = ready(&Inventory::starting(), &readiness(None), true, Some(&first), late);
    assert_eq!(second.last_transition_time.0, early);
    let third = ready(&Inventory::starting(), &readiness(Some("no library")), true, Some(&first), late);
    assert_eq!((third.last_transition_time.0, third.reason.as_str()), (late, "NoDevices"));
}

#[test]
fn holder_from_before_config_change_counts_by_gpu() {
    use crate::inventory::Hardware;
    use crate::offer::offer;
    use gantry_config::{Config, ReplicatedDevices, ReplicatedResource, Selector, TimeSlicing};

    let hardware = Hardware::of(two_gpus());
    let shared = |replicas| Config {
        time_slicing: Some(TimeSlicing {
            rename_by_default: true,
            fail_requests_greater_than_one: false,
            resources: vec![ReplicatedResource {
                name: "nvidia.com/gpu".into(),
                rename: None,
                devices: ReplicatedDevices::All,
                replicas,
            }],
        }),
        ..Config::default()
    };
    let denied = Config { deny: vec![Selector::Index(1)], ..Config::default() };
    // The counts for an allocated `id` while it is offered by `config`: devices, GPUs.
    let counted = |id: &str, config: &Config| {
        let inventory = offer(&hardware, config);
        let holder = Holder {
            namespace: "ml".to_owned(),
            pod: "notebook-0".to_owned(),
            uid: None,
            resource: "nvidia.com/of-then".into(),
            devices: vec![id.into()],
            provenance: Provenance::PodResources,
            state: HolderState::Live,
        };
        let holders = [holder];
        let devices = held(&inventory, &holders);
        let ids: Vec<&str> = devices.iter().map(|device| device.id.as_str()).collect();
        let resources = resources(&inventory, &devices);
        let gpus = summary(&inventory, &holders, &resources).held;
        (ids.join(" "), gpus)
    };
    let (whole, two) = (Config::default(), shared(2));
    assert_eq!(counted("GPU-1", &whole), ("GPU-1".to_owned(), 1));
    assert_eq!(counted("GPU-1", &two), ("GPU-1::0 GPU-1::1".to_owned(), 1));
    assert_eq!(counted("GPU-1::0", &two), ("GPU-1::0".to_owned(), 1));
    assert_eq!(counted("GPU-1::5", &two), ("GPU-1::1".to_owned(), 1));
    assert_eq!(counted("GPU-1::5", &whole), ("GPU-1".to_owned(), 1));
    assert_eq!(counted("GPU-1", &denied), (String::new(), 1));
    assert_eq!(counted("eth1", &whole), (String::new(), 0));
}

#[test]
fn device_is_unhealthy_with_diagnosis() {
    use crate::health::{Cause, Extent, GpuName, Trouble};
    use crate::inventory::Device;

    let device = |gpu: u8, replica: u16| Device {
        id: format!("GPU-{gpu}::{replica}").into(),
        resource: "nvidia.com/gpu".into(),
        gpu,
        nvml_index: Some(gpu),
        uuid: format!("GPU-{gpu}"),
        health: DeviceHealth { healthy: true, reason: None },
        minor: None,
        numa: None,
        slice: None,
        replica: Some(replica),
    };
    let devices = vec![device(0, 0), device(0, 1), device(1, 0), device(1, 1)];
    let inventory = Inventory::ready(two_gpus(), devices);
    let diagnosis = Diagnosis {
        troubles: vec![Trouble {
            gpu: GpuName::Uuid("GPU-1".parse().unwrap()),
            extent: Extent::Gpu,
            cause: Cause::Lost,
            xid: None,
            reason: "GPU lost".to_owned(),
        }],
        ..Diagnosis::default()
    };
    let judged = with_troubles(&inventory, &diagnosis);
    let healthy: Vec<bool> = judged.devices.iter().map(|device| device.health.healthy).collect();
    assert_eq!(healthy, [true, true, false, false]);
    assert_eq!(judged.devices[3].health.reason.as_deref(), Some("GPU lost"));
}

#[test]
fn gpu_without_uuid_is_not_healthy() {
    let mut parts = (*two_gpus()).clone().into_parts();
    parts.gpus[1].uuid = None;
    let machine = Arc::new(Machine::new(parts).unwrap());
    let summary = summary(&Inventory::ready(machine, Vec::new()), &[], &[]);
    assert_eq!((summary.gpus, summary.healthy), (2, 1));
}

/// The API server refuses a larger object, and the node would publish nothing.
#[test]
fn largest_status_fits_into_etcd() {
    let id = |at: usize| format!("MIG-GPU-01234567-89ab-cdef-0123-456789abcdef/13/7::{at:05}");
    let devices = (0..gantry_config::MOST_DEVICES).map(|at| DeviceStatus {
        id: id(at).into(),
        resource: "nvidia.com/mig-1g.10gb.shared".into(),
        gpu: 31,
        slice: Some(Slice { profile: "1g.10gb+me".to_owned(), start: 7, size: 1 }),
        replica: Some(9999),
        health: bounded(&DeviceHealth {
            healthy: false,
            reason: Some("a reason with its remedy ".repeat(40)),
        }),
    });
    let holders = (0..gantry_config::MOST_DEVICES / 8).map(|pod| Holder {
        namespace: "machine-learning".to_owned(),
        pod: format!("training-{pod:05}-abcde"),
        uid: Some("01234567-89ab-cdef-0123-456789abcdef".into()),
        resource: "nvidia.com/mig-1g.10gb.shared".into(),
        devices: (0..8).map(|at| id(8 * pod + at).into()).collect(),
        provenance: Provenance::PodResources,
        state: HolderState::Live,
    });
    let status =
        GpuNodeStatus { devices: devices.collect(), holders: holders.collect(), ..GpuNodeStatus::default() };
    let bytes = serde_json::to_string(&status).unwrap().len();
    assert!(bytes < 3 << 19, "{bytes} bytes");
}

fn trouble(gpu: &str, cause: Cause) -> crate::health::Trouble {
    let gpu = crate::health::GpuName::Uuid(gpu.parse().unwrap());
    crate::health::Trouble { gpu, extent: Extent::Gpu, cause, xid: None, reason: String::new() }
}

/// The time of a problem decides whether it is a new one, for remediation.
#[test]
fn problem_keeps_its_time_while_it_lasts() {
    let mut machine = (*two_gpus()).clone().into_parts();
    machine.gpus[1].throttle = Some(Throttle::Thermal);
    let machine = Arc::new(Machine::new(machine).unwrap());
    let inventory = Inventory { machine, ..Inventory::starting() };
    let [early, late] = [1, 2].map(|second| Timestamp::from_second(second).unwrap());
    let mut diagnosis = Diagnosis {
        known: true,
        adopted: true,
        troubles: vec![
            trouble("GPU-0", Cause::Lost),
            trouble("GPU-0", Cause::Xid(crate::health::Class::Fatal)),
        ],
        notices: vec![trouble("GPU-1", Cause::LinksDown)],
        ..Diagnosis::default()
    };
    let first = problems(&inventory, &diagnosis, &[], early);
    let named: Vec<_> =
        first.iter().map(|one| (one.gpu.as_str(), one.cause.as_str(), one.unhealthy)).collect();
    // The Xid is among the faults.
    assert_eq!(
        named,
        [("GPU-0", "lost", true), ("GPU-1", "nvlinks-down", false), ("GPU-1", "throttled-thermal", false)]
    );
    diagnosis.notices.clear();
    diagnosis.troubles.push(trouble("GPU-1", Cause::Fabric));
    let second = problems(&inventory, &diagnosis, &first, late);
    let times: Vec<_> = second.iter().map(|one| (one.cause.as_str(), one.since.0)).collect();
    assert_eq!(times, [("lost", early), ("fabric", late), ("throttled-thermal", early)]);
    // A plugin that has just started knows nothing yet.
    diagnosis.adopted = false;
    assert_eq!(problems(&inventory, &diagnosis, &first, late), first);
}

/// What no pod holds is compared with nothing, and would only make writes.
#[test]
fn clocks_of_held_gpus_are_published() {
    use crate::inventory::Hardware;
    use crate::offer::offer;

    let inventory = offer(&Hardware::of(two_gpus()), &gantry_config::Config::default());
    let clock = |gpu: &str| GpuClock {
        gpu: gpu.to_owned(),
        sm_percent: 100,
        power_percent: None,
        limits: Vec::new(),
    };
    let diagnosis =
        Diagnosis { clocks: ["GPU-0", "GPU-1", "GPU-gone"].map(clock).into(), ..Diagnosis::default() };
    let holder = |gpu: &str| Holder {
        namespace: "ml".to_owned(),
        pod: "trainer-0".to_owned(),
        uid: None,
        resource: "nvidia.com/gpu".into(),
        devices: vec![gpu.into()],
        provenance: Provenance::PodResources,
        state: HolderState::Live,
    };
    assert_eq!(clocks(&inventory, &[holder("GPU-1")], &diagnosis), [clock("GPU-1")]);
    assert_eq!(clocks(&inventory, &[], &diagnosis), []);
}

#[test]
fn every_cause_has_a_public_name() {
    use crate::health::Class;
    let classes = [Class::Fatal, Class::Resettable, Class::Link { reset: true }, Class::MigInstance];
    let causes = [
        Cause::Uncorrected,
        Cause::RepairPending,
        Cause::LinksDown,
        Cause::Fabric,
        Cause::ComputeMode,
        Cause::QueryFailed,
        Cause::Lost,
        Cause::RecoveryAction,
        Cause::RepairFailed,
        Cause::Nvml,
        Cause::Driver,
    ];
    for cause in classes.map(Cause::Xid).into_iter().chain(causes) {
        let name = cause.to_string();
        assert!(gantry_api::gpunode::PROBLEM_CAUSES.contains(&name.as_str()), "{name}");
    }
}
