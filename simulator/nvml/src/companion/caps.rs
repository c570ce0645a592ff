//! The driver's capabilities: access to `/dev/nvidia-caps/nvidia-capN` grants the use of one. Those of instances follow
//! the MIG layout of a GPU; all others stay.

use std::fmt::Write as _;

use gantry_topology::Mig;
use gantry_topology::machine::MAX_GPUS;

use super::CompanionError;
use super::files::Files;
use crate::facts::Facts;

/// Major number of `/dev/nvidia-caps/*`; real ones vary, as the kernel gives them out.
pub(super) const CAPS: u32 = 509;
/// Major number of `/dev/nvidia-caps-imex-channels/*`; real ones vary too.
pub(super) const IMEX: u32 = 508;
/// Minor numbers of the capability to change how GPUs are cut, and of the one to watch all instances.
const CONFIG: u32 = 1;
const MONITOR: u32 = 2;
/// GPU instances, and compute instances in each, that the driver has numbers for.
const GPU_INSTANCES: u32 = 15;
const COMPUTE_INSTANCES: u32 = 8;

/// Minor number of a GPU instance's capability, and of a compute instance's: the driver numbers all that there could be.
fn minor(gpu: u32, gpu_instance: u32, compute_instance: Option<u32>) -> u32 {
    let of_gpu = MONITOR + 1 + gpu * GPU_INSTANCES * (COMPUTE_INSTANCES + 1);
    of_gpu + gpu_instance * (COMPUTE_INSTANCES + 1) + compute_instance.map_or(0, |id| id + 1)
}

fn access(minor: u32) -> String {
    format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
}

/// What is there whatever the cut: the numbers of all capabilities, those of MIG as a whole, and an IMEX channel.
pub(super) fn write(files: &mut Files) -> Result<(), CompanionError> {
    let mut minors = format!("config {CONFIG}\nmonitor {MONITOR}\n");
    for gpu in (0..).take(MAX_GPUS) {
        for gpu_instance in 0..GPU_INSTANCES {
            let number = minor(gpu, gpu_instance, None);
            // Writing to a text cannot fail.
            let _ = writeln!(minors, "gpu{gpu}/gi{gpu_instance}/access {number}");
            for compute in 0..COMPUTE_INSTANCES {
                let number = minor(gpu, gpu_instance, Some(compute));
                let _ = writeln!(minors, "gpu{gpu}/gi{gpu_instance}/ci{compute}/access {number}");
            }
        }
    }
    files.file("proc/driver/nvidia-caps/mig-minors", &minors)?;
    for (name, number) in [("config", CONFIG), ("monitor", MONITOR)] {
        files.file(format!("proc/driver/nvidia/capabilities/mig/{name}"), &access(number))?;
        files.device(format!("dev/nvidia-caps/nvidia-cap{number}"), CAPS, number)?;
    }
    files.file("proc/driver/nvidia/capabilities/fabric-imex-mgmt", &access(0))?;
    files.device("dev/nvidia-caps-imex-channels/channel0", IMEX, 0)
}

/// The instances of every GPU.
pub(super) fn write_instances(
    files: &mut Files,
    facts: &Facts,
    cuts: &[Option<&Mig>],
) -> Result<(), CompanionError> {
    for (gpu, cut) in facts.gpus.iter().zip(cuts) {
        let Some(mig) = cut.filter(|mig| mig.enabled) else {
            continue;
        };
        let folder = format!("proc/driver/nvidia/capabilities/gpu{}/mig", gpu.minor);
        files.folder(&folder)?;
        for instance in &mig.instances {
            let mut capability = |path: String, number: u32| {
                files.file(format!("{folder}/{path}/access"), &access(number))?;
                files.device(format!("dev/nvidia-caps/nvidia-cap{number}"), CAPS, number)
            };
            capability(format!("gi{}", instance.id), minor(gpu.minor, instance.id, None))?;
            for compute in &instance.compute {
                capability(
                    format!("gi{}/ci{}", instance.id, compute.id),
                    minor(gpu.minor, instance.id, Some(compute.id)),
                )?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_numbered_as_on_a_real_machine() {
        // From the mig-minors of a DGX A100.
        assert_eq!(minor(0, 0, None), 3);
        assert_eq!(minor(0, 0, Some(0)), 4);
        assert_eq!(minor(0, 7, None), 66);
        assert_eq!(minor(0, 7, Some(0)), 67);
        assert_eq!(minor(1, 0, None), 138);
    }
}
