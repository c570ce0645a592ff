//! No request makes the service panic, and it allocates exactly the requested devices.

use gantry_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, PreStartContainerRequest,
    PreferredAllocationRequest,
};
use proptest::collection::vec;
use proptest::prelude::*;
use prost::Message;

use super::entry::kubelet::{Call, RESOURCES, bytes, message};

/// Devices of every resource, some from an earlier list, and arbitrary text.
fn ids() -> impl Strategy<Value = Vec<String>> {
    let known = vec![
        "GPU-a", "GPU-b", "GPU-c", "GPU-d::0", "GPU-d::1", "GPU-d::2", "MIG-0", "MIG-1", "MIG-2", "MIG-3",
    ];
    let former = vec!["GPU-d", "GPU-a::7", "MIG-0::0", "GPU-a::-1", "GPU-a::70000", "GPU-a::0::0", "::", ""];
    let id = prop_oneof![
        12 => prop::sample::select(known),
        1 => prop::sample::select(former),
    ];
    let id = prop_oneof![12 => id.prop_map(str::to_owned), 1 => any::<String>()];
    vec(id, 0..6)
}

fn allocate() -> impl Strategy<Value = Vec<u8>> {
    vec(ids(), 0..3).prop_map(|containers| {
        let containers = containers.into_iter();
        let container_requests =
            containers.map(|device_ids| ContainerAllocateRequest { device_ids }).collect();
        AllocateRequest { container_requests }.encode_to_vec()
    })
}

fn prefer() -> impl Strategy<Value = Vec<u8>> {
    let size = prop_oneof![8 => 0..6, 1 => any::<i32>()];
    let container =
        (ids(), ids(), size).prop_map(|(offered, must, size)| ContainerPreferredAllocationRequest {
            available_device_ids: offered,
            must_include_device_ids: must,
            allocation_size: size,
        });
    vec(container, 0..3)
        .prop_map(|container_requests| PreferredAllocationRequest { container_requests }.encode_to_vec())
}

fn resource() -> impl Strategy<Value = &'static str> {
    prop::sample::select(RESOURCES.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    #[test]
    fn allocate_returns_exactly_requested_devices(resource in resource(), request in allocate()) {
        message(resource, Call::Allocate, &request);
    }

    #[test]
    fn preference_is_part_of_offer(resource in resource(), request in prefer()) {
        message(resource, Call::Prefer, &request);
    }

    #[test]
    fn request_with_changed_byte_gets_response_or_error(
        (resource, call) in (resource(), prop::sample::select(Call::ALL.to_vec())),
        mut request in prop_oneof![allocate(), prefer()],
        (place, byte) in (any::<prop::sample::Index>(), any::<u8>()),
    ) {
        if !request.is_empty() {
            let place = place.index(request.len());
            request[place] = byte;
        }
        message(resource, call, &request);
    }

    #[test]
    fn any_bytes_get_response_or_error(input in vec(any::<u8>(), 0..64)) {
        bytes(&input);
    }
}

#[test]
fn pre_start_container_accepts_any_name() {
    let device_ids = vec!["nobody".to_owned()];
    message(RESOURCES[0], Call::PreStart, &PreStartContainerRequest { device_ids }.encode_to_vec());
}

#[test]
fn options_equal_registration() {
    message(RESOURCES[0], Call::Options, &[]);
}
