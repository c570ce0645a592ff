//! The `gantry` binary: reads the command line, sets up logging and signals, and runs the command. Each command is in
//! its own module or crate.

#[cfg(target_os = "linux")]
mod check;
mod choose;
mod cluster;
mod command_line;
mod complete;
mod doctor;
mod explain;
#[cfg(target_os = "linux")]
mod gpu_metrics;
mod gpus;
#[cfg(target_os = "linux")]
mod labels;
mod live_map;
mod manual;
mod map;
mod migrate;
mod output;
mod runtime;
mod scheduler_config;
mod screen;
mod top;
mod topo;
mod version;
mod visible;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::CompleteEnv;

use runtime::Threads;

/// GPU allocation for Kubernetes: the best-connected GPUs for every pod, and a reason for every choice.
#[derive(Parser)]
#[command(name = "gantry", version, arg_required_else_help = true, after_help = AFTER_HELP)]
struct Cli {
    #[command(flatten)]
    log: runtime::LogArgs,

    /// Shut down when standard input closes, that is when the parent process ends
    #[arg(long, global = true, hide = true)]
    end_with_stdin: bool,

    #[command(subcommand)]
    command: Command,
}

#[cfg(all(feature = "demo", target_os = "linux"))]
macro_rules! demo_example {
    () => {
        "  gantry demo                                  see it all work, without a GPU and without a cluster\n"
    };
}
#[cfg(not(all(feature = "demo", target_os = "linux")))]
macro_rules! demo_example {
    () => {
        ""
    };
}

#[cfg(target_os = "linux")]
macro_rules! plugin_example {
    () => {
        "  gantry plugin --node-name node-1 --kubeconfig ~/.kube/config\n"
    };
}
#[cfg(not(target_os = "linux"))]
macro_rules! plugin_example {
    () => {
        ""
    };
}

const AFTER_HELP: &str = concat!(
    "Examples:\n",
    demo_example!(),
    "  nvidia-smi topo -m | gantry topo --from -    look at a machine
  gantry choose --from machine.yaml --size 4   which four GPUs of it, and why\n",
    plugin_example!(),
    "
Exit codes: 0 done, 1 failed, 2 bad command line or bad input (a bad file for the plugin is 1).
Logs go to standard error; RUST_LOG sets their level, such as RUST_LOG=debug or RUST_LOG=gantry_plugin=trace."
);

#[derive(Subcommand)]
enum Command {
    /// Run the node daemon: the device plugin that kubelet gets its GPUs from
    #[cfg(target_os = "linux")]
    Plugin(Box<gantry_plugin::Args>),
    /// Run the scheduler extender: picks node and GPUs for kube-scheduler
    Extender(Box<gantry_extender::Args>),
    /// Show a machine: links, NUMA nodes, NICs
    Topo(topo::TopoArgs),
    /// Say which GPUs of a machine a job of some size would get, and why
    Choose(choose::ChooseArgs),
    /// Say why a pod is where it is, or why it waits and what would have to end for it to fit
    Explain(explain::ExplainArgs),
    /// Draw the GPUs of the cluster, their links and their holders
    Map(map::MapArgs),
    /// Show the map in the terminal, live
    Top(top::TopArgs),
    /// Withhold a GPU from new pods; pods that hold it go on
    Cordon(gpus::CordonArgs),
    /// Give a cordoned GPU to new pods again
    Uncordon(gpus::UncordonArgs),
    /// Empty a GPU: cordon it, and evict the pods that hold it, gangs as a whole
    Drain(gpus::DrainArgs),
    /// Reset a drained GPU, in a privileged pod on its node
    Reset(gpus::ResetArgs),
    /// Run the driver's nvidia-smi to reset GPUs of this node; the pod of `gantry reset gpu` does
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    ResetDevice(gpus::ResetDeviceArgs),
    /// Show what speaks for the replacement of a GPU: its Xids, remapped memory and resets
    Evidence(gpus::EvidenceArgs),
    /// Print the configuration with which kube-scheduler calls the extender, for the resources of a cluster
    SchedulerConfig(scheduler_config::SchedulerConfigArgs),
    /// Turn the values, ClusterPolicy or DaemonSet of NVIDIA's plugin into values of Gantry's chart
    Migrate(migrate::MigrateArgs),
    /// Check an installation: a line per check, with the command that mends what fails
    Doctor(doctor::DoctorArgs),
    /// Print what the GPUs of this node are doing, under the names of NVIDIA's dcgm-exporter
    #[cfg(target_os = "linux")]
    GpuMetrics(gpu_metrics::GpuMetricsArgs),
    /// Print or write the labels of a node: NVIDIA's, and those of links, NUMA nodes and products
    #[cfg(target_os = "linux")]
    Labels(Box<labels::LabelsArgs>),
    /// Print the versions of this program, of the extender and of the plugins
    Version(version::VersionArgs),
    /// Print the script by which a shell completes command lines
    Completion(complete::CompletionArgs),
    /// Write the manual pages
    #[command(hide = true)]
    Man(manual::ManArgs),
    /// Start both daemons against simulated machines and an embedded cluster, and show which pod gets which GPUs and
    /// why
    #[cfg(all(feature = "demo", target_os = "linux"))]
    Demo(gantry_demo::Args),
}

/// The name of this program as a plugin of kubectl.
const KUBECTL_PLUGIN: &str = "kubectl-gantry";

/// The command line's definition, under the name by which the program was started.
fn command() -> clap::Command {
    let started_as = std::env::args_os().next().map(PathBuf::from);
    let is_plugin =
        started_as.as_deref().and_then(Path::file_stem).is_some_and(|name| name == KUBECTL_PLUGIN);
    let command = Cli::command();
    if is_plugin { command.name("kubectl gantry").bin_name("kubectl gantry") } else { command }
}

/// Parses the command line, or prints the error and exits. The parser is built once, because the plugin's start waits
/// for it.
fn read(line: impl IntoIterator<Item = OsString>) -> Cli {
    let mut definition = command_line::without_empty_variables(command());
    let line = command_line::with_double_dashes(line);
    let matches = definition.try_get_matches_from_mut(&line);
    let mut matches =
        matches.unwrap_or_else(|error| command_line::naming_variable(error, &mut definition, &line).exit());
    let read = Cli::from_arg_matches_mut(&mut matches);
    read.unwrap_or_else(|error| error.format(&mut command()).exit())
}

fn main() -> ExitCode {
    // A shell that completes a command line; it exits then.
    CompleteEnv::with_factory(command).var(complete::VARIABLE).complete();
    let Cli { log, end_with_stdin, command } = read(std::env::args_os());
    let result = match command {
        #[cfg(target_os = "linux")]
        Command::Plugin(args) if args.config.check_config.is_some() => {
            log.start_quiet();
            check::run(&args)
        }
        #[cfg(target_os = "linux")]
        Command::Plugin(args) => {
            log.start();
            runtime::serve(Threads::One, end_with_stdin, |shutdown| gantry_plugin::run(*args, shutdown))
        }
        Command::Extender(args) => {
            log.start();
            runtime::serve(Threads::Many, end_with_stdin, |shutdown| gantry_extender::run(*args, shutdown))
        }
        Command::Topo(args) => {
            log.start_quiet();
            topo::run(&args)
        }
        Command::Choose(args) => {
            log.start_quiet();
            choose::run(&args)
        }
        #[cfg(target_os = "linux")]
        Command::Labels(args) => {
            log.start_quiet();
            runtime::query(Threads::One, labels::run(*args))
        }
        #[cfg(target_os = "linux")]
        Command::GpuMetrics(args) => {
            log.start_quiet();
            gpu_metrics::run(&args)
        }
        Command::SchedulerConfig(args) => {
            log.start_quiet();
            runtime::query(Threads::One, scheduler_config::run(args))
        }
        Command::Migrate(args) => {
            log.start_quiet();
            migrate::run(&args)
        }
        Command::Doctor(args) => {
            log.start_quiet();
            runtime::query(Threads::One, doctor::run(args))
        }
        Command::Explain(args) => {
            log.start_quiet();
            runtime::query(Threads::Many, explain::run(args))
        }
        Command::Map(args) => {
            log.start_quiet();
            runtime::query(Threads::One, map::run(args))
        }
        Command::Top(args) => {
            log.start_silent();
            runtime::serve(Threads::One, false, |shutdown| top::run(args, shutdown))
        }
        Command::Version(args) => {
            log.start_quiet();
            runtime::query(Threads::One, version::run(args))
        }
        Command::Completion(args) => complete::run(&args),
        Command::Man(args) => manual::run(&args, Cli::command()),
        Command::Cordon(args) => {
            log.start_quiet();
            runtime::serve(Threads::One, false, |_| gpus::cordon(args))
        }
        Command::Uncordon(args) => {
            log.start_quiet();
            runtime::serve(Threads::One, false, |_| gpus::uncordon(args))
        }
        Command::Drain(args) => {
            log.start_quiet();
            runtime::serve(Threads::Many, false, |shutdown| gpus::drain(args, shutdown))
        }
        Command::Reset(args) => {
            log.start_quiet();
            runtime::serve(Threads::One, false, |shutdown| gpus::reset(args, shutdown))
        }
        #[cfg(target_os = "linux")]
        Command::ResetDevice(args) => {
            log.start_quiet();
            gpus::reset_device(&args)
        }
        Command::Evidence(args) => {
            log.start_quiet();
            runtime::query(Threads::One, gpus::evidence(args))
        }
        #[cfg(all(feature = "demo", target_os = "linux"))]
        Command::Demo(args) => {
            log.start_quiet();
            runtime::serve(Threads::Many, end_with_stdin, |shutdown| gantry_demo::run(args, shutdown))
        }
    };
    runtime::exit_code(result)
}
