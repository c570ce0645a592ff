//! NVIDIA's Python bindings as an independent client: they read every machine in a separate process, and receive an
//! event raised by this one. Without Python or the package the tests are reported as ignored, or as failed if `CI` or
//! `GANTRY_REQUIRE_PYTHON` is set.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use gantry_nvml_sim::control::Process;
use gantry_nvml_sim::facts::{GpuFacts, Remote};
use gantry_nvml_sim::{LIBRARY_NAME, PlacedMachine, place};
use gantry_topology::PathClass;
use gantry_topology::machine::split_profile;
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::{Value, json};

/// The package, in the version the tests were written for.
const PACKAGE: &str = "nvidia-ml-py==13.615.71";

const MACHINES: [&str; 14] = [
    "a100-1x-mig",
    "a30-4x-mig",
    "a40-8x-bridged",
    "b200-8x-mig",
    "dgx-a100",
    "dgx-a100-mig",
    "dgx1-v100",
    "dgx2-16x-v100",
    "h200-8x-mig",
    "hgx-h100",
    "hgx-h100-mig",
    "l4-4x-pcie",
    "rtx-pro-6000-4x-mig",
    "workstation-2x",
];

fn main() {
    let arguments = Arguments::from_args();
    let python = if arguments.list { Err("not looked for".to_owned()) } else { python_with_package() };
    let required = ["CI", "GANTRY_REQUIRE_PYTHON"]
        .iter()
        .any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
    let skip = python.is_err() && !required;
    let by_self = MACHINES.iter().map(|machine| (format!("python_reads_{machine}"), *machine, Named::BySelf));
    let by_environment =
        ("python_reads_a_machine_that_the_environment_names".to_owned(), "dgx-a100", Named::ByEnvironment);
    let trials = by_self.chain([by_environment]).map(|(name, machine, named)| {
        let python = python.clone();
        Trial::test(name, move || read_machine(&python?, machine, named)).with_ignored_flag(skip)
    });
    let for_cut = python.clone();
    let cut = Trial::test("python_cuts_a_gpu", move || cut_gpu(&for_cut?)).with_ignored_flag(skip);
    let trials = trials.chain([cut]).collect();
    if let Err(problem) = &python
        && !arguments.list
    {
        report(problem);
    }
    libtest_mimic::run(&arguments, trials).exit();
}

#[expect(clippy::print_stderr, reason = "why tests are ignored has to be seen")]
fn report(problem: &str) {
    eprintln!("Python's bindings cannot be tried: {problem}");
}

/// A Python that has the package: a virtual environment below the build folder, made on first use.
fn python_with_package() -> Result<PathBuf, String> {
    let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nvidia-ml-py");
    let python = environment.join("bin/python3");
    let found = run(Command::new(&python).args(["-c", "import pynvml"]));
    if found.is_ok() {
        return Ok(python);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment))?;
    run(Command::new(&python).args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        PACKAGE,
    ]))?;
    run(Command::new(&python).args(["-c", "import pynvml"]))?;
    Ok(python)
}

fn run(command: &mut Command) -> Result<Output, String> {
    let shown = format!("{command:?}");
    let output = command.output().map_err(|error| format!("{shown}: {error}"))?;
    if output.status.success() {
        Ok(output)
    } else {
        Err(format!("{shown}: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

/// The library finds its machine file beside itself, or where the environment says.
#[derive(Clone, Copy)]
enum Named {
    BySelf,
    ByEnvironment,
}

fn read_machine(python: &Path, machine: &str, named: Named) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../machines/{machine}.yaml"));
    let placed = place(&std::fs::read_to_string(&file)?, &file, folder.path())?;
    let busy = busy(&placed);
    placed.controller.set_temperature(busy, 71)?;
    placed
        .controller
        .set_processes(busy, vec![Process { pid: 4711, memory_mib: 10, ..Process::default() }])?;

    // The bindings ask the loader for this name.
    assert_eq!(placed.library.file_name(), Some(LIBRARY_NAME.as_ref()));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/read_machine.py");
    let elsewhere = tempfile::tempdir()?;
    let mut command = Command::new(python);
    command.arg(script).stdout(Stdio::piped());
    match named {
        Named::BySelf => command.env("LD_LIBRARY_PATH", folder.path()),
        Named::ByEnvironment => {
            std::fs::copy(&placed.library, elsewhere.path().join(LIBRARY_NAME))?;
            command.env("LD_LIBRARY_PATH", elsewhere.path()).env("GANTRY_SIM_MACHINE", &placed.machine_file)
        }
    };
    let mut client = command.spawn()?;
    let output = client.stdout.take().ok_or("no output")?;
    let mut lines = BufReader::new(output).lines();
    let mut next = || -> Result<Value, Failed> {
        let line = lines.next().ok_or("Python ended early; its own words stand above")??;
        Ok(serde_json::from_str(&line)?)
    };
    let told = next()?;
    assert_eq!(told["driver"], placed.facts.driver.as_str());
    assert_eq!(told["cuda"], placed.facts.cuda);
    assert_eq!(told["gpus"].as_array().map(Vec::len), Some(placed.facts.gpus.len()));
    for gpu in &placed.facts.gpus {
        compare(&told["gpus"][gpu.index], gpu, &placed);
    }

    placed.controller.raise_xid_in(busy, 95, 3, 0)?;
    let heard = next()?;
    assert_eq!(
        heard,
        json!({"uuid": placed.facts.gpus[usize::from(busy)].uuid, "xid": 95, "gpuInstance": 3})
    );
    assert!(client.wait()?.success());
    Ok(())
}

fn compare(told: &Value, gpu: &GpuFacts, placed: &PlacedMachine) {
    let mut cpus = gpu.cpus.clone();
    cpus.sort_unstable();
    let levels: Vec<u32> =
        (0..placed.facts.gpus.len()).map(|other| level(gpu.index, other, placed)).collect();
    let (temperature, processes) =
        if gpu.index == usize::from(busy(placed)) { (71, json!([4711])) } else { (35, json!([])) };
    let expected = json!({
        "uuid": gpu.uuid,
        "name": gpu.model,
        "index": gpu.index,
        "minor": gpu.minor,
        "serial": gpu.serial,
        "busId": gpu.address.nvml(),
        "pciDeviceId": u32::from(gpu.product.device_id) << 16 | 0x10de,
        "memory": gpu.memory_mib << 20,
        "capability": [gpu.compute_capability.0, gpu.compute_capability.1],
        "architecture": gpu.product.architecture,
        "pcie": [gpu.pcie.generation, gpu.pcie.width],
        "cpus": cpus,
        "levels": levels,
        "links": (0..18).map(|number| link(number, gpu, placed)).collect::<Vec<_>>(),
        "linkCount": (gpu.nvlink_count > 0).then_some(gpu.nvlink_count),
        "migMode": gpu.mig.as_ref().map(|mig| u8::from(mig.enabled)),
        "migs": migs(gpu),
        "temperature": temperature,
        "processes": processes,
    });
    for (name, value) in expected.as_object().into_iter().flatten() {
        assert_eq!(told[name], *value, "GPU {}: {name}", gpu.index);
    }
}

/// The GPU on which something happens: the last one.
fn busy(placed: &PlacedMachine) -> u8 {
    u8::try_from(placed.facts.gpus.len() - 1).unwrap_or(0)
}

fn migs(gpu: &GpuFacts) -> Value {
    let mut instances: Vec<_> = gpu.mig.iter().flat_map(|mig| &mig.instances).collect();
    instances.sort_by_key(|instance| instance.id);
    let devices = instances.into_iter().flat_map(|instance| {
        instance.compute.iter().map(move |compute| {
            let has = compute.attributes.unwrap_or_default();
            // The driver leaves out the `+me` of the GPU instance.
            let (profile, _) = split_profile(&compute.profile);
            json!({
                "uuid": compute.uuid,
                "parent": gpu.uuid,
                "name": format!("{} MIG {profile}", gpu.model),
                "instances": [instance.id, compute.id],
                "slices": [has.gpu_slices, has.compute_slices],
                "multiprocessors": has.multiprocessors,
                "memory": has.memory_mib << 20,
            })
        })
    });
    devices.collect()
}

fn cut_gpu(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../machines/dgx-a100.yaml");
    let placed = place(&std::fs::read_to_string(&file)?, &file, folder.path())?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/cut_gpu.py");
    let mut command = Command::new(python);
    let output = run(command.arg(script).env("LD_LIBRARY_PATH", folder.path()))?;
    let (in_use, no_room) = (19, 23);
    let name = format!("{} MIG 1c.3g.20gb", placed.facts.gpus[0].model);
    assert_eq!(
        serde_json::from_slice::<Value>(&output.stdout)?,
        json!({
            "fits": 2,
            "left": 1,
            "instance": [1, 9, 0, 4],
            "names": [name, name, name],
            "full": no_room,
            "inUse": in_use,
            "sevenths": 3,
        })
    );
    let state = placed.controller.state()?;
    let mig = state.gpus[&0].mig.as_ref().ok_or("GPU 0 is not cut")?;
    assert_eq!(mig.instances[0].compute.len(), 3);
    Ok(())
}

fn level(first: usize, second: usize, placed: &PlacedMachine) -> u32 {
    if first == second {
        return 0;
    }
    match placed.facts.machine().paths().get(first, second) {
        PathClass::Pix => 10,
        PathClass::Pxb => 20,
        PathClass::Phb => 30,
        PathClass::Node => 40,
        PathClass::Sys | PathClass::Soc => 50,
    }
}

fn link(number: usize, gpu: &GpuFacts, placed: &PlacedMachine) -> Value {
    let (not_supported, invalid_argument) = (3, 2);
    if gpu.nvlink_count == 0 {
        return json!({"error": not_supported});
    }
    if number >= usize::from(gpu.nvlink_count) {
        return json!({"error": invalid_argument});
    }
    match gpu.links.get(number) {
        None => json!({"active": false}),
        Some(Remote::Gpu { index, .. }) => {
            json!({"active": true, "kind": 0, "remote": placed.facts.gpus[*index].address.nvml()})
        }
        Some(Remote::Switch { index }) => {
            json!({"active": true, "kind": 2, "remote": placed.facts.switches[*index].nvml()})
        }
    }
}
