//! Changes a simulated machine from a shell, while its clients run:
//!
//! ```text
//! cargo run -p gantry-nvml-sim --example control -- install simulator/machines/hgx-h100.yaml /tmp/node
//! cargo run -p gantry-nvml-sim --example control -- change /tmp/node xid 3 79
//! ```

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use gantry_nvml_sim::control::{ComputeMode, Controller, FabricState, FabricStep, ReportedFacts};
use gantry_nvml_sim::install;

/// Installs and changes simulated machines.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Installs a machine into a folder: library, machine file, and root/{proc,sys,dev}.
    Install {
        /// The machine file.
        machine: PathBuf,
        /// The folder.
        folder: PathBuf,
    },
    /// Changes the machine of a folder.
    Change {
        /// The folder that `machine.yaml` lies in.
        folder: PathBuf,
        #[command(subcommand)]
        change: Change,
    },
    /// Prints what has been changed, and how often each NVML function was called.
    Show {
        /// The folder that `machine.yaml` lies in.
        folder: PathBuf,
    },
}

#[derive(Subcommand)]
enum Change {
    /// Raises an Xid on a GPU.
    Xid {
        /// Index of the GPU.
        gpu: u8,
        /// The Xid.
        xid: u64,
        /// GPU instance it is confined to, and compute instance if one.
        #[arg(num_args = 1..=2)]
        instance: Vec<u32>,
    },
    /// Drops a GPU off the bus.
    Lose {
        /// Index of the GPU.
        gpu: u8,
    },
    /// Brings a lost GPU back.
    Restore {
        /// Index of the GPU.
        gpu: u8,
    },
    /// Takes a GPU out of the machine.
    Remove {
        /// Index of the GPU in the machine file.
        gpu: u8,
    },
    /// Puts a GPU back.
    Add {
        /// Index of the GPU in the machine file.
        gpu: u8,
    },
    /// Turns MIG on and changes the MIG layout of a GPU.
    Cut {
        /// Index of the GPU.
        gpu: u8,
        /// The instances: 1g.5gb, 3g.20gb@4 (starts at unit 4), 3g.20gb@4=1c,2c (two compute instances).
        pieces: Vec<String>,
    },
    /// Ends all instances of a GPU and turns MIG off.
    Uncut {
        /// Index of the GPU.
        gpu: u8,
    },
    /// Sets uncorrected ECC errors since the driver's load, and marks rows: remapping pending or failed.
    Ecc {
        /// Index of the GPU.
        gpu: u8,
        /// Uncorrected errors.
        uncorrected: u64,
        /// A row waits to be remapped.
        #[arg(long)]
        pending: bool,
        /// A remapping has failed.
        #[arg(long)]
        failed: bool,
    },
    /// Unloads the driver.
    Unload,
    /// Loads the driver again.
    Load,
    /// Takes an NVLink down.
    LinkDown {
        /// Index of the GPU.
        gpu: u8,
        /// Number of the link.
        link: u8,
    },
    /// Brings an NVLink up.
    LinkUp {
        /// Index of the GPU.
        gpu: u8,
        /// Number of the link.
        link: u8,
    },
    /// Makes calls of a function fail.
    Fail {
        /// Name of the function.
        name: String,
        /// The nvmlReturn_t to answer with.
        code: u32,
        /// How many calls; all, if left out.
        times: Option<u64>,
        /// Index of the GPU on which they fail; every GPU, if left out. Not with a number of calls.
        #[arg(long, conflicts_with = "times")]
        gpu: Option<u8>,
    },
    /// Makes calls of a function hang until it is cleared.
    Hang {
        /// Name of the function.
        name: String,
        /// Index of the GPU on which they hang; every GPU, if left out.
        #[arg(long)]
        gpu: Option<u8>,
    },
    /// Ends what fail, hang and slow did to a function.
    Clear {
        /// Name of the function.
        name: String,
    },
    /// Sets the number of GPUs that NVML reports.
    Count {
        /// The number; the true one, if left out.
        count: Option<u32>,
    },
    /// Sets a GPU's registration with the NVLink fabric.
    Fabric {
        /// Index of the GPU.
        gpu: u8,
        state: Fabric,
        /// The nvmlReturn_t of a completed registration.
        #[arg(long, default_value_t = 0)]
        status: u32,
        /// NVML's health mask.
        #[arg(long)]
        mask: Option<u32>,
        /// NVML's health summary: 1 healthy, 2 unhealthy, 3 limited capacity.
        #[arg(long)]
        summary: Option<u8>,
    },
    /// Sets which processes may compute on a GPU.
    ComputeMode {
        /// Index of the GPU.
        gpu: u8,
        mode: Mode,
    },
    /// Sets facts that NVML reports of a GPU instead of the machine file's.
    Report {
        /// Index of the GPU.
        gpu: u8,
        #[arg(long)]
        uuid: Option<String>,
        #[arg(long)]
        name: Option<String>,
        #[arg(long)]
        minor: Option<u32>,
        /// Total memory.
        #[arg(long)]
        memory_mib: Option<u64>,
    },
    /// Sets the driver version that NVML reports.
    DriverVersion {
        /// The version; the machine file's, if left out.
        version: Option<String>,
    },
    /// Makes calls of a function slow.
    Slow {
        /// Name of the function.
        name: String,
        /// Milliseconds.
        milliseconds: u64,
    },
    /// Sets a GPU's temperature.
    Heat {
        /// Index of the GPU.
        gpu: u8,
        /// Degrees Celsius.
        celsius: u32,
    },
    /// Undoes all changes.
    Reset,
    /// Makes libraries read control.yaml again after it was edited by hand.
    Announce,
}

/// A step of the registration with the NVLink fabric.
#[derive(Clone, Copy, ValueEnum)]
enum Fabric {
    NotSupported,
    NotStarted,
    InProgress,
    Completed,
}

/// Which processes may compute on a GPU.
#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    Default,
    Prohibited,
    ExclusiveProcess,
}

#[expect(clippy::print_stdout, reason = "a command prints its answer")]
fn main() -> anyhow::Result<()> {
    match Arguments::parse().task {
        Task::Install { machine, folder } => {
            let installed = install(&machine, &folder)?;
            println!("library  {}", installed.library.display());
            println!("machine  {}", installed.machine_file.display());
            println!("root     {}", installed.layout.root.display());
            for misfit in installed.layout.misfits {
                println!("warning  {misfit}");
            }
        }
        Task::Change { folder, change } => {
            let machine = folder.join(gantry_nvml_sim::MACHINE_FILE);
            anyhow::ensure!(machine.exists(), "there is no {}", machine.display());
            apply(&Controller::attach(&folder)?, change)?;
        }
        Task::Show { folder } => {
            let controller = Controller::attach(&folder)?;
            let state = controller.state()?;
            let text = serde_saphyr::to_string(&state).context("cannot write the state as YAML")?;
            println!("{text}");
            for (name, calls) in controller.calls().by_name() {
                println!("{calls:>8}  {name}");
            }
        }
    }
    Ok(())
}

fn apply(controller: &Controller, change: Change) -> anyhow::Result<()> {
    match change {
        Change::Xid { gpu, xid, instance } => match instance.as_slice() {
            [gpu_instance, compute_instance] => {
                controller.raise_xid_in(gpu, xid, *gpu_instance, *compute_instance)?;
            }
            [gpu_instance] => controller.raise_xid_in(gpu, xid, *gpu_instance, u32::MAX)?,
            _ => controller.raise_xid(gpu, xid)?,
        },
        Change::Lose { gpu } => controller.lose_gpu(gpu)?,
        Change::Restore { gpu } => controller.restore_gpu(gpu)?,
        Change::Remove { gpu } => controller.remove_gpu(gpu)?,
        Change::Add { gpu } => controller.add_gpu(gpu)?,
        Change::Cut { gpu, pieces } => {
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            controller.recut(gpu, &pieces)?;
        }
        Change::Uncut { gpu } => controller.uncut(gpu)?,
        Change::Ecc { gpu, uncorrected, pending, failed } => controller.update_gpu(gpu, |gpu| {
            gpu.ecc.volatile_uncorrected = uncorrected;
            gpu.remapped.pending = pending;
            gpu.remapped.failed = failed;
        })?,
        Change::Unload => controller.unload_driver()?,
        Change::Load => controller.load_driver()?,
        Change::LinkDown { gpu, link } => controller.set_nvlink(gpu, link, false)?,
        Change::LinkUp { gpu, link } => controller.set_nvlink(gpu, link, true)?,
        Change::Fail { name, code, times, gpu: None } => controller.fail_call(&name, code, times)?,
        Change::Fail { name, code, times: _, gpu: Some(gpu) } => controller.fail_call_on(gpu, &name, code)?,
        Change::Hang { name, gpu: None } => controller.hang_call(&name)?,
        Change::Hang { name, gpu: Some(gpu) } => controller.hang_call_on(gpu, &name)?,
        Change::Clear { name } => controller.clear_rule(&name)?,
        Change::Count { count } => controller.set_count(count)?,
        Change::Fabric { gpu, state, status, mask, summary } => {
            let state = match state {
                Fabric::NotSupported => FabricStep::NotSupported,
                Fabric::NotStarted => FabricStep::NotStarted,
                Fabric::InProgress => FabricStep::InProgress,
                Fabric::Completed => FabricStep::Completed,
            };
            controller.set_fabric(gpu, Some(FabricState { state, status, health_mask: mask, summary }))?;
        }
        Change::ComputeMode { gpu, mode } => controller.set_compute_mode(
            gpu,
            match mode {
                Mode::Default => ComputeMode::Default,
                Mode::Prohibited => ComputeMode::Prohibited,
                Mode::ExclusiveProcess => ComputeMode::ExclusiveProcess,
            },
        )?,
        Change::Report { gpu, uuid, name, minor, memory_mib } => {
            controller
                .update_gpu(gpu, |gpu| gpu.reported = ReportedFacts { uuid, name, minor, memory_mib })?;
        }
        Change::DriverVersion { version } => controller.update(|state| state.driver.version = version)?,
        Change::Slow { name, milliseconds } => {
            controller.slow_call(&name, Duration::from_millis(milliseconds))?;
        }
        Change::Heat { gpu, celsius } => controller.set_temperature(gpu, celsius)?,
        Change::Reset => controller.reset()?,
        Change::Announce => controller.announce(),
    }
    Ok(())
}
