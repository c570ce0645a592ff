//! Repeated readings need no additional memory or files. A process of its own, so that nothing else is counted.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;

use gantry_plugin::discover;
use gantry_plugin::nvml::Nvml;
use sim::Sim;

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn repeated_reads_and_loads_leak_nothing() {
    let sim = Sim::of("workstation-2x");
    let options = sim.options();
    let load_and_read = |reads: usize| {
        let nvml = Nvml::load(&options.library).unwrap();
        for _ in 0..reads {
            let found = discover::read(&nvml, &options).unwrap();
            assert_eq!(found.machine.gpus().len(), 2);
            let mut events = nvml.event_set().unwrap();
            events.register(nvml.device(0).unwrap()).unwrap();
        }
    };
    let rounds = |loads: usize| {
        for _ in 0..loads {
            load_and_read(10);
        }
        (resident_kib(), open_files())
    };
    // The allocator grows in the first rounds.
    let (before, files_before) = rounds(30);
    let (after, files_after) = rounds(300);
    assert_eq!(files_after, files_before);
    assert!(after < before + 1024, "{before} KiB before, {after} KiB after 3000 reads and 300 loads");
}
