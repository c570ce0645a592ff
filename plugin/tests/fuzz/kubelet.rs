//! No request makes the service panic, and what it gives is what was asked for.

use gantry_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, PreStartContainerRequest,
    PreferredAllocationRequest,
};
use proptest::collection::vec;
use proptest::prelude::*;
use prost::Message;

use super::entry::kubelet::{Call, RESOURCES, bytes, message};

/// Devices of every resource, some that a former list may have had, and anything.
fn ids() -> impl Strategy<Value = Vec<String>> {
    let known = vec![
        "GPU-a", "GPU-b", "GPU-c", "GPU-d::0", "GPU-d::1", "GPU-d::2", "MIG-0", "MIG-1", "MIG-2", "MIG-3",
    ];
    let former = vec![
        "GPU-d",
        "GPU-a::7",
        "MIG-0::0",
        "GPU-a::-1",
        "GPU-a::70000",
        "GPU-a::0::0",
        "::",
        "",
    ];
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
        let container_requests = containers
            .map(|device_ids| ContainerAllocateRequest { device_ids })
            .collect();
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
    fn exactly_what_kubelet_allocates_is_given(resource in resource(), request in allocate()) {
        message(resource, Call::Allocate, &request);
    }

    #[test]
    fn what_is_preferred_is_of_what_was_offered(resource in resource(), request in prefer()) {
        message(resource, Call::Prefer, &request);
    }

    #[test]
    fn a_request_with_a_byte_changed_is_answered_or_refused(
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
    fn any_bytes_are_answered_or_refused(input in vec(any::<u8>(), 0..64)) {
        bytes(&input);
    }
}

#[test]
fn a_container_of_any_name_is_prepared() {
    let device_ids = vec!["nobody".to_owned()];
    message(
        RESOURCES[0],
        Call::PreStart,
        &PreStartContainerRequest { device_ids }.encode_to_vec(),
    );
}

#[test]
fn the_options_are_those_of_the_registration() {
    message(RESOURCES[0], Call::Options, &[]);
}
