//! Shared devices: replicas and their names, entries that match nothing, and the limit of one message.

use super::super::*;
use super::{Board, cut, expect, hardware, offered, problems, share, sharing, whole, with};
use gantry_config::{DeviceRef, MigStrategy, ReplicatedDevices, ResourcePattern};

#[test]
fn replicas_have_numbered_ids_and_the_uuid_of_their_device() {
    let config = sharing(vec![share("nvidia.com/gpu", ReplicatedDevices::All, 2, None)]);
    assert_eq!(
        offered(&[whole(), whole()], &config),
        expect(&[("nvidia.com/gpu", &["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"])])
    );
    let inventory = offer(&hardware(&[whole()]), &config);
    assert_eq!(inventory.devices[1].uuid, "GPU-0");
    assert_eq!(inventory.devices[1].replica, Some(1));
    assert!(inventory.resources[&ResourceName::from("nvidia.com/gpu")].replicated);
}

#[test]
fn shared_and_whole_gpus_coexist() {
    // A UUID may be written in letters of either case.
    let boards = [whole(), whole(), whole(), cut(&["1g.5gb", "1g.5gb"])];
    let listed = |list: &[DeviceRef]| ReplicatedDevices::Listed(list.to_vec());
    let config = sharing(vec![
        share("nvidia.com/gpu", listed(&[DeviceRef::Gpu(1)]), 2, Some("nvidia.com/gpu-shared")),
        share(
            "nvidia.com/gpu",
            listed(&[DeviceRef::Uuid("gpu-2".to_owned())]),
            3,
            Some("nvidia.com/gpu-third"),
        ),
        share("nvidia.com/mig-1g.5gb", listed(&[DeviceRef::Mig(3, 1)]), 2, Some("nvidia.com/mig-shared")),
    ]);
    assert_eq!(
        offered(&boards, &config),
        expect(&[
            ("nvidia.com/gpu", &["GPU-0"]),
            ("nvidia.com/gpu-shared", &["GPU-1::0", "GPU-1::1"]),
            ("nvidia.com/gpu-third", &["GPU-2::0", "GPU-2::1", "GPU-2::2"]),
            ("nvidia.com/mig-1g.5gb", &["MIG-30"]),
            ("nvidia.com/mig-shared", &["MIG-31::0", "MIG-31::1"]),
        ])
    );
    assert_eq!(problems(&boards, &config), Vec::<String>::new());
    let first =
        sharing(vec![share("nvidia.com/gpu", ReplicatedDevices::Count(1), 2, Some("nvidia.com/half"))]);
    assert_eq!(
        offered(&boards[..2], &first),
        expect(&[("nvidia.com/gpu", &["GPU-1"]), ("nvidia.com/half", &["GPU-0::0", "GPU-0::1"])])
    );
}

#[test]
fn rename_applies_to_all_shared_resources() {
    let mut config = sharing(vec![share("nvidia.com/gpu", ReplicatedDevices::All, 2, None)]);
    if let Some(slicing) = &mut config.time_slicing {
        slicing.rename_by_default = true;
        slicing.fail_requests_greater_than_one = true;
    }
    config.shared_devices = Some(SharedDevices::Packed);
    assert_eq!(offered(&[whole()], &config), expect(&[("nvidia.com/gpu.shared", &["GPU-0::0", "GPU-0::1"])]));
    let terms = offer(&hardware(&[whole()]), &config).resources[&ResourceName::from("nvidia.com/gpu.shared")];
    assert_eq!(
        terms,
        Terms {
            sharing: SharedDevices::Packed,
            replicated: true,
            fail_requests_greater_than_one: true,
            slices: false
        }
    );
}

#[test]
fn sharing_entry_without_its_devices_is_reported_once() {
    let listed = |gpus: &[u8]| ReplicatedDevices::Listed(gpus.iter().copied().map(DeviceRef::Gpu).collect());
    let boards = [whole(), whole(), whole(), whole()];
    let absent = share("nvidia.com/gpu", listed(&[7]), 4, None);
    let reported = |entry: usize| {
        format!("sharing.timeSlicing.resources[{entry}] (nvidia.com/gpu): none of its devices here is 7")
    };
    assert_eq!(problems(&boards, &sharing(vec![absent.clone()])), [reported(0)]);
    let all = share("nvidia.com/gpu", ReplicatedDevices::All, 2, None);
    assert_eq!(problems(&boards, &sharing(vec![all.clone(), absent])), [reported(1)]);
    // One device is taken, and one does not exist: both are reported.
    let both = share("nvidia.com/gpu", listed(&[0, 7]), 4, None);
    assert_eq!(
        problems(&boards, &sharing(vec![all, both])),
        [
            reported(1),
            "sharing.timeSlicing.resources[1] (nvidia.com/gpu): all devices it names are shared by an earlier entry".to_owned()
        ]
    );
}

#[test]
fn sharing_entry_that_matches_nothing_is_reported() {
    let config = sharing(vec![
        share("nvidia.com/mig-1g.5gb", ReplicatedDevices::All, 2, None),
        share(
            "nvidia.com/gpu",
            ReplicatedDevices::Listed(vec![DeviceRef::Gpu(0), DeviceRef::Gpu(7)]),
            2,
            None,
        ),
        share("nvidia.com/gpu", ReplicatedDevices::Count(5), 2, None),
        share("nvidia.com/gpu", ReplicatedDevices::All, 2, None),
    ]);
    let mut patterns = Config {
        gpu_patterns: vec![ResourcePattern { pattern: "*H100*".to_owned(), name: "nvidia.com/h100".into() }],
        ..with(MigStrategy::Mixed)
    };
    patterns.mig_patterns.clone_from(&patterns.gpu_patterns);
    let boards = [whole(), whole()];
    insta::assert_debug_snapshot!((problems(&boards, &config), problems(&boards, &patterns)));
    let mixture = sharing(vec![share("nvidia.com/gpu", ReplicatedDevices::Count(1), 2, None)]);
    insta::assert_debug_snapshot!(problems(&boards, &mixture));
}

#[test]
fn offer_stays_below_kubelets_message_limit() {
    use gantry_proto::deviceplugin::{Device, ListAndWatchResponse, NumaNode, TopologyInfo};
    use prost::Message;

    let config = |replicas| sharing(vec![share("nvidia.com/gpu", ReplicatedDevices::All, replicas, None)]);
    let one = offer(&hardware(&[whole()]), &config(2560));
    assert_eq!((one.devices.len(), one.problems.len()), (2560, 0));

    let boards: Vec<Board> = (0..8).map(|_| whole()).collect();
    let inventory = offer(&hardware(&boards), &config(u16::MAX));
    let longest = |device: &crate::inventory::Device| Device {
        // The longest name of a MIG device so far, and the longest number of a replica.
        id: format!("MIG-GPU-01234567-89ab-cdef-0123-456789abcdef/13/7::{:0>5}", device.replica.unwrap()),
        health: "Unhealthy".to_owned(),
        topology: Some(TopologyInfo { nodes: vec![NumaNode { id: 255 }] }),
    };
    let list = ListAndWatchResponse { devices: inventory.devices.iter().map(longest).collect() };
    assert!(list.encoded_len() < 4 << 20, "{} bytes", list.encoded_len());
    assert_eq!(inventory.devices.len(), 2560);
    assert_eq!(
        inventory.problems,
        [
            "sharing.timeSlicing.resources[0] (nvidia.com/gpu): 65535 replicas of each of 8 devices are more than the 2560 devices that a GpuNode in etcd holds; 320 are offered"
        ]
    );
}
