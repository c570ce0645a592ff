use std::path::Path;

use gantry_api::DeviceHealth;

use super::*;

fn device(gpu: u8) -> Device {
    Device {
        id: format!("GPU-{gpu}").into(),
        resource: "nvidia.com/gpu".into(),
        gpu,
        uuid: format!("GPU-{gpu}"),
        health: DeviceHealth {
            healthy: true,
            reason: None,
        },
        minor: Some(u32::from(gpu)),
        numa: None,
        slice: None,
        replica: None,
    }
}

fn respond(strategies: &[Strategy], dev: &Path, devices: &[&Device]) -> ContainerAllocateResponse {
    Responder::new(
        strategies.to_vec(),
        "gantry.dev/gpu".into(),
        dev.into(),
        "/run/driver".into(),
    )
    .respond(devices)
}

#[test]
fn the_environment_names_the_gpus() {
    let response = respond(
        &[Strategy::Envvar],
        Path::new("/nowhere"),
        &[&device(3), &device(5)],
    );
    assert_eq!(response.envs[VISIBLE_DEVICES], "GPU-3,GPU-5");
    assert!(
        response.devices.is_empty() && response.cdi_devices.is_empty() && response.annotations.is_empty()
    );
}

#[test]
fn nodes_that_exist_are_passed_with_the_hosts_paths() {
    let dev = tempfile::tempdir().unwrap();
    for name in ["nvidiactl", "nvidia-uvm"] {
        std::fs::write(dev.path().join(name), "").unwrap();
    }
    let response = respond(&[Strategy::DeviceNodes], dev.path(), &[&device(2)]);
    let paths: Vec<(&str, &str)> = response
        .devices
        .iter()
        .map(|spec| (spec.host_path.as_str(), spec.container_path.as_str()))
        .collect();
    assert_eq!(
        paths,
        [
            ("/run/driver/dev/nvidiactl", "/dev/nvidiactl"),
            ("/run/driver/dev/nvidia-uvm", "/dev/nvidia-uvm"),
            ("/run/driver/dev/nvidia2", "/dev/nvidia2"),
        ]
    );
}

#[test]
fn strategies_add_up() {
    let all = [Strategy::CdiCri, Strategy::Envvar, Strategy::CdiAnnotations];
    let response = respond(&all, Path::new("/nowhere"), &[&device(0), &device(1)]);
    assert_eq!(response.envs[VISIBLE_DEVICES], "GPU-0,GPU-1");
    let names: Vec<&str> = response
        .cdi_devices
        .iter()
        .map(|device| device.name.as_str())
        .collect();
    assert_eq!(names, ["gantry.dev/gpu=GPU-0", "gantry.dev/gpu=GPU-1"]);
    assert_eq!(
        response.annotations.values().collect::<Vec<_>>(),
        ["gantry.dev/gpu=GPU-0,gantry.dev/gpu=GPU-1"]
    );
}

#[test]
fn two_replicas_of_a_gpu_are_one_device_to_the_container() {
    let (mut first, mut second) = (device(4), device(4));
    first.id = "GPU-4::0".into();
    second.id = "GPU-4::1".into();
    let dev = tempfile::tempdir().unwrap();
    let response = respond(
        &[Strategy::Envvar, Strategy::DeviceNodes],
        dev.path(),
        &[&first, &second],
    );
    assert_eq!(response.envs[VISIBLE_DEVICES], "GPU-4");
    assert_eq!(response.devices.len(), 1);
}
