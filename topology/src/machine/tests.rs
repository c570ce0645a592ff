use super::*;

fn pair(paths: &[&str]) -> MachineParts {
    MachineParts {
        gpus: vec![Gpu { index: 0, ..Gpu::default() }, Gpu { index: 1, ..Gpu::default() }],
        paths: PathMatrix::try_from(paths.iter().map(|row| (*row).to_owned()).collect::<Vec<_>>()).unwrap(),
        ..MachineParts::default()
    }
}

#[test]
fn bridged_pair_written_and_read_is_the_same() {
    let mut parts = pair(&["X PHB", "PHB X"]);
    parts.nvlinks.push(NvLinkBundle { gpus: [1, 0], links: 4 });
    let machine = Machine::new(parts).unwrap();
    assert_eq!(machine.link(0, 1), Link::NvLink(4));
    assert_eq!(machine.paths().get(0, 1), PathClass::Phb);
    let yaml = serde_saphyr::to_string(&machine).unwrap();
    assert_eq!(serde_saphyr::from_str::<Machine>(&yaml).unwrap(), machine);
}

#[test]
fn switched_pair_has_the_lesser_link_count() {
    let mut parts = pair(&["X SYS", "SYS X"]);
    parts.gpus[0].nvlink = Some(NvLinkPorts { version: Some(4), switch_links: 18, ..NvLinkPorts::default() });
    parts.gpus[1].nvlink = Some(NvLinkPorts { version: Some(4), switch_links: 12, ..NvLinkPorts::default() });
    assert_eq!(Machine::new(parts.clone()).unwrap().link(1, 0), Link::NvLink(12));
    if let Some(ports) = &mut parts.gpus[1].nvlink {
        ports.island = 1;
    }
    let apart = Machine::new(parts).unwrap();
    assert!(matches!(apart.link(1, 0), Link::Pcie(_)), "the switches are not joined");
}

#[test]
fn contradiction_names_its_field() {
    let mut parts = pair(&["X SYS", "SYS X"]);
    parts.gpus[1].index = 3;
    assert_eq!(Machine::new(parts).unwrap_err().to_string(), "gpus[1].index: is 3, must be 1");

    let mut parts = pair(&["X SYS", "SYS X"]);
    parts.nvlinks.push(NvLinkBundle { gpus: [0, 7], links: 4 });
    assert_eq!(
        Machine::new(parts).unwrap_err().to_string(),
        "nvlinks[0].gpus: GPU 7 does not exist, there are 2"
    );
}

/// Copied lines of a machine file: the address of a NIC, and a UUID in other case, which names the same GPU everywhere else.
#[test]
fn identifier_of_two_devices_is_refused_with_both() {
    type Change = fn(&mut MachineParts);
    let machine = |change: Change| {
        let uuid = |text: &str| Some(text.parse().unwrap());
        let bus_id = |text: &str| Some(text.parse().unwrap());
        let mut parts = MachineParts {
            gpus: vec![
                Gpu { index: 0, uuid: uuid("GPU-0a"), bus_id: bus_id("0000:17:00.0"), ..Gpu::default() },
                Gpu { index: 1, uuid: uuid("GPU-0b"), bus_id: bus_id("0000:31:00.0"), ..Gpu::default() },
            ],
            nics: vec![
                Nic { name: "mlx5_0".into(), bus_id: bus_id("0000:4b:00.0"), ..Nic::default() },
                Nic { name: "mlx5_1".into(), bus_id: bus_id("0000:4b:00.1"), ..Nic::default() },
            ],
            paths: PathMatrix::from_fn(4, |_, _| PathClass::Sys),
            ..MachineParts::default()
        };
        change(&mut parts);
        Machine::new(parts).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(machine(|_| ()), Ok(()));
    let cases: [(Change, &str); 3] = [
        (
            |parts| parts.nics[1].bus_id = parts.nics[0].bus_id.clone(),
            "nics[1].busId: is 0000:4b:00.0, the same as nics[0].busId; each device has its own address",
        ),
        (
            |parts| parts.nics[0].bus_id = parts.gpus[1].bus_id.clone(),
            "nics[0].busId: is 0000:31:00.0, the same as gpus[1].busId; each device has its own address",
        ),
        (|parts| parts.gpus[1].uuid = "GPU-0A".parse().ok(), "gpus[1].uuid: the same as gpus[0].uuid"),
    ];
    for (change, problem) in cases {
        assert_eq!(machine(change), Err(problem.to_owned()));
    }
}

/// On a DGX-1 a GPU lost all links before anything looked; of four A40s only two have a bridge.
#[test]
fn gpu_without_its_links_is_degraded_on_a_board_only() {
    let machine = |model: &str, bundles: &[[u8; 2]]| {
        let ports = NvLinkPorts { version: Some(2), ..NvLinkPorts::default() };
        let gpu = |index| Gpu { index, model: Some(model.into()), nvlink: Some(ports), ..Gpu::default() };
        Machine::new(MachineParts {
            gpus: (0..4).map(gpu).collect(),
            nvlinks: bundles.iter().map(|gpus| NvLinkBundle { gpus: *gpus, links: 2 }).collect(),
            paths: PathMatrix::from_fn(4, |_, _| PathClass::Sys),
            ..MachineParts::default()
        })
        .unwrap()
    };
    let board = machine("Tesla V100-DGXS-16GB", &[[0, 1], [1, 2], [0, 2]]);
    assert_eq!(board.degradations(3), [Degradation::NvLinks { up: 0, of: 4 }]);
    assert_eq!(board.links_down(), [(3, "4 of 4 NVLinks down".to_owned())]);
    let pair_left = machine("Tesla V100-SXM2-16GB", &[[0, 1]]);
    assert_eq!(pair_left.links_down().len(), 2);
    let bridged = machine("NVIDIA A40", &[[0, 1]]);
    assert!(bridged.links_down().is_empty() && bridged.degradations(3).is_empty());
    // Direct links may differ by design: the lack is shown, and is no complaint.
    let chain = machine("Tesla V100-SXM2-16GB", &[[0, 1], [1, 2], [2, 3]]);
    assert!(chain.links_down().is_empty());
    assert_eq!(chain.degradations(3), [Degradation::NvLinks { up: 2, of: 4 }]);
}

#[test]
fn asymmetric_matrix_is_refused_at_the_cell() {
    let rows = ["X PIX", "SYS X"].map(str::to_owned).to_vec();
    assert_eq!(
        PathMatrix::try_from(rows).unwrap_err().to_string(),
        "row 1, column 0: SYS, but PIX in row 0, column 1"
    );
}

#[test]
fn nvml_bus_ids_become_sysfs_addresses() {
    assert_eq!("00000000:0F:00.0".parse::<PcieAddress>().unwrap().as_str(), "0000:0f:00.0");
    assert_eq!("00010000:0F:00.0".parse::<PcieAddress>().unwrap().as_str(), "10000:0f:00.0");
    assert!("0000:0f".parse::<PcieAddress>().is_err());
    assert!("0000:0f:20.0".parse::<PcieAddress>().is_err());
}

#[test]
fn id_lists_keep_their_text() {
    let list: IdList = "0,5-7,1-1".parse().unwrap();
    assert_eq!(list.iter().collect::<Vec<_>>(), [0, 5, 6, 7, 1]);
    assert_eq!(list.to_string(), "0,5-7,1-1");
    for bad in ["", "a", "3-1", "1,", "0-99999999", "+1"] {
        assert!(bad.parse::<IdList>().is_err(), "{bad}");
    }
}

fn instance(id: u32, start: u8, size: u8) -> GpuInstance {
    GpuInstance {
        id,
        profile: "1g.5gb".into(),
        start,
        size,
        compute: vec![ComputeInstance {
            id: 0,
            uuid: format!("MIG-{id:08x}").parse().unwrap(),
            profile: "1g.5gb".into(),
            attributes: None,
        }],
    }
}

fn cut(instances: Vec<GpuInstance>) -> Result<Machine, MachineError> {
    let mut parts = pair(&["X PHB", "PHB X"]);
    parts.gpus[1].mig = Some(Mig { enabled: true, instances });
    Machine::new(parts)
}

#[test]
fn gpu_instances_are_sorted_by_start() {
    let machine = cut(vec![instance(9, 4, 4), instance(7, 0, 1)]).unwrap();
    let instances = &machine.gpus()[1].mig.as_ref().unwrap().instances;
    assert_eq!(instances.iter().map(|i| i.id).collect::<Vec<_>>(), [7, 9]);
    assert_eq!(instances[1].units(), 0b1111_0000);
    let yaml = serde_saphyr::to_string(&machine).unwrap();
    assert_eq!(serde_saphyr::from_str::<Machine>(&yaml).unwrap(), machine);
}

#[test]
fn impossible_instances_are_refused() {
    let refusal = |instances| cut(instances).unwrap_err().to_string();
    assert_eq!(
        refusal(vec![instance(1, 0, 4), instance(2, 3, 1)]),
        "gpus[1].mig.instances[1].start: overlaps another instance"
    );
    assert_eq!(
        refusal(vec![instance(1, 0, 1), instance(1, 1, 1)]),
        "gpus[1].mig.instances[1].id: 1 is another instance's too"
    );
    insta::assert_snapshot!(refusal(vec![instance(1, 250, 16)]), @"gpus[1].mig.instances[0]: must cover 1 to 16 memory units, ending at 16 at most");
    let mut twice = vec![instance(1, 0, 1), instance(2, 1, 1)];
    twice[1].compute[0].uuid = twice[0].compute[0].uuid.clone();
    insta::assert_snapshot!(refusal(twice), @"gpus[1].mig: MIG-00000001 is the UUID of another MIG device too, in gpus[1].mig");
    let mut parts = pair(&["X PHB", "PHB X"]);
    parts.gpus[0].mig = Some(Mig { enabled: false, instances: vec![instance(1, 0, 1)] });
    insta::assert_snapshot!(Machine::new(parts).unwrap_err(), @"gpus[0].mig.instances: must be empty while enabled is false");
}

/// Two GPUs of one `/dev/nvidiaN` would be one GPU to a container.
#[test]
fn repeated_identifiers_are_refused_with_both_places() {
    let refused = |change: &dyn Fn(&mut Gpu)| {
        let mut parts = pair(&["X PHB", "PHB X"]);
        parts.gpus.iter_mut().for_each(change);
        Machine::new(parts).unwrap_err().to_string()
    };
    let minor = refused(&|gpu| gpu.minor = Some(3));
    insta::assert_snapshot!(minor, @"gpus[1].minor: is 3, the same as gpus[0].minor; each GPU has its own /dev/nvidiaN");
    let uuid = refused(&|gpu| gpu.uuid = "GPU-a".parse().ok());
    assert_eq!(uuid, "gpus[1].uuid: the same as gpus[0].uuid");
    let bus_id = refused(&|gpu| gpu.bus_id = "0000:17:00.0".parse().ok());
    assert_eq!(bus_id, "gpus[1].busId: the same as gpus[0].busId");
    let index = refused(&|gpu| gpu.index = 0);
    assert_eq!(index, "gpus[1].index: is 0, must be 1");
}
