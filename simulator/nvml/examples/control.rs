//! Changes a simulated machine from a shell, while its clients run:
//!
//! ```text
//! cargo run -p gantry-nvml-sim --example control -- install simulator/machines/hgx-h100.yaml /tmp/node
//! cargo run -p gantry-nvml-sim --example control -- change /tmp/node xid 3 79
//! ```

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand};
use gantry_nvml_sim::control::Controller;
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
        Change::Fail { name, code, times } => controller.fail_call(&name, code, times)?,
        Change::Slow { name, milliseconds } => {
            controller.slow_call(&name, Duration::from_millis(milliseconds))?;
        }
        Change::Heat { gpu, celsius } => controller.set_temperature(gpu, celsius)?,
        Change::Reset => controller.reset()?,
        Change::Announce => controller.announce(),
    }
    Ok(())
}
