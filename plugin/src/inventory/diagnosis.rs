//! What is wrong with the node's GPUs, as the owner of NVML publishes it beside the hardware, and what it can be told about
//! it. Values and channels; what they mean is the health module's.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use gantry_api::GpuFault;
use gantry_topology::{Gpu, GpuUuid};
use tokio::sync::watch;

use crate::health::{Cause, Ended, Extent, GpuName, Outage, Trouble};

/// Everything that is wrong at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Diagnosis {
    /// Whether the machine was read at least once: before, nothing wrong means nothing known.
    pub known: bool,
    /// Why no GPU can be asked at all; `None` while they can.
    pub outage: Option<Outage>,
    /// What is wrong, by GPU and part of it.
    pub troubles: Vec<Trouble>,
    /// The faults in quarantine, as they are to be stored.
    pub faults: Vec<StoredFault>,
    /// The faults that ended last, oldest first, each with its number from 1: at most [`Diagnosis::MOST_ENDED`].
    pub ended: Vec<(u64, Ended)>,
    /// Whether the faults of an earlier run were taken in, or cannot be had. Before, `faults` is not the whole of it.
    pub adopted: bool,
    /// How many times a quarantine was lifted.
    pub lifts: u64,
}

impl Diagnosis {
    /// How many ended faults are kept.
    pub const MOST_ENDED: usize = 32;
}

/// A [`GpuFault`] that can be compared.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredFault(pub GpuFault);

// Nothing in it is a floating-point number.
impl Eq for StoredFault {}

/// Something the owner is told.
#[derive(Debug, Clone)]
pub(super) enum Order {
    /// Faults of an earlier run.
    Adopt(Vec<GpuFault>),
    /// A person ends the quarantine of these GPUs.
    Lift(Lift),
}

/// The GPUs whose quarantine a person ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lift {
    /// Every GPU.
    All,
    /// These.
    Gpus(BTreeSet<GpuUuid>),
}

/// A word that names no GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is no GPU; write all, or UUIDs such as GPU-5ab8... with commas")]
pub struct LiftError {
    /// The word.
    pub word: String,
}

impl Lift {
    /// Whether a GPU is meant.
    pub fn means(&self, gpu: &GpuUuid) -> bool {
        match self {
            Self::All => true,
            Self::Gpus(gpus) => gpus.contains(gpu),
        }
    }
}

impl std::str::FromStr for Lift {
    type Err = LiftError;

    fn from_str(text: &str) -> Result<Self, LiftError> {
        let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
        if words.clone().any(|word| word.eq_ignore_ascii_case("all")) {
            return Ok(Self::All);
        }
        let gpu = |word: &str| {
            word.parse().map_err(|_| LiftError {
                word: word.to_owned(),
            })
        };
        let gpus: BTreeSet<GpuUuid> = words.map(gpu).collect::<Result<_, _>>()?;
        if gpus.is_empty() {
            return Err(LiftError { word: String::new() });
        }
        Ok(Self::Gpus(gpus))
    }
}

/// What others know of the diagnosis, and tell its owner. Clones are alike.
#[derive(Debug, Clone)]
pub struct Diagnoses {
    diagnosis: watch::Receiver<Arc<Diagnosis>>,
    orders: Sender<Order>,
}

/// Marks every GPU in the diagnosis while its owner says nothing: the owner's next word sets it right. Clones are alike.
#[derive(Debug, Clone)]
pub struct Marker(watch::Sender<Arc<Diagnosis>>);

impl Marker {
    /// Says of all these GPUs that NVML fails. What else was wrong with them nobody can know now; their faults stay.
    pub fn mark<'a>(&self, gpus: impl Iterator<Item = &'a Gpu>, reason: &str) {
        let troubles: Vec<Trouble> = gpus
            .map(|gpu| Trouble {
                gpu: gpu.uuid.clone().map_or(GpuName::Place(gpu.index), GpuName::Uuid),
                extent: Extent::Gpu,
                cause: Cause::Nvml,
                reason: reason.to_owned(),
            })
            .collect();
        self.0.send_if_modified(|diagnosis| {
            let changed = diagnosis.troubles != troubles;
            if changed {
                Arc::make_mut(diagnosis).troubles = troubles;
            }
            changed
        });
    }
}

/// The owner's end.
#[derive(Debug)]
pub(super) struct DiagnosesEnd {
    pub(super) diagnosis: watch::Sender<Arc<Diagnosis>>,
    pub(super) orders: Receiver<Order>,
}

impl DiagnosesEnd {
    pub(super) fn marker(&self) -> Marker {
        Marker(self.diagnosis.clone())
    }
}

impl Diagnoses {
    pub(super) fn pair() -> (Self, DiagnosesEnd) {
        let (publish, diagnosis) = watch::channel(Arc::<Diagnosis>::default());
        let (orders, received) = channel();
        let end = DiagnosesEnd {
            diagnosis: publish,
            orders: received,
        };
        (Self { diagnosis, orders }, end)
    }

    /// One whose owner says nothing, and who marks it.
    #[cfg(test)]
    pub(crate) fn with_marker(self) -> (Self, Marker) {
        let marker = Marker(watch::channel(self.now()).0);
        let diagnosis = marker.0.subscribe();
        (Self { diagnosis, ..self }, marker)
    }

    /// One of no owner, for an inventory from elsewhere: nothing is ever wrong.
    pub fn of_nobody() -> Self {
        let (diagnoses, end) = Self::pair();
        end.diagnosis.send_replace(Arc::new(Diagnosis {
            known: true,
            adopted: true,
            ..Diagnosis::default()
        }));
        diagnoses
    }

    /// One whose owner cannot ask any GPU.
    #[cfg(test)]
    pub(crate) fn with_outage(outage: Outage) -> Self {
        let (diagnoses, end) = Self::pair();
        end.diagnosis.send_replace(Arc::new(Diagnosis {
            known: true,
            outage: Some(outage),
            ..Diagnosis::default()
        }));
        diagnoses
    }

    /// The diagnosis, and its changes.
    pub fn diagnosis(&self) -> watch::Receiver<Arc<Diagnosis>> {
        self.diagnosis.clone()
    }

    /// The diagnosis now.
    pub fn now(&self) -> Arc<Diagnosis> {
        Arc::clone(&self.diagnosis.borrow())
    }

    /// Comes back when the faults of an earlier run were taken in, and after `most` in any case.
    pub async fn adopted(&self, most: Duration) {
        let mut diagnosis = self.diagnosis();
        let adopted = diagnosis.wait_for(|now| now.adopted);
        if !matches!(tokio::time::timeout(most, adopted).await, Ok(Ok(_))) {
            tracing::debug!("faults of an earlier run are not known yet");
        }
    }

    /// Hands over the faults of an earlier run: none if it left none.
    pub fn adopt(&self, faults: Vec<GpuFault>) {
        self.order(Order::Adopt(faults));
    }

    /// Ends the quarantine of these GPUs.
    pub fn lift(&self, lift: Lift) {
        self.order(Order::Lift(lift));
    }

    fn order(&self, order: Order) {
        if self.orders.send(order).is_err() {
            tracing::debug!("the owner of NVML has stopped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_person_names_gpus_or_all() {
        assert_eq!("all".parse(), Ok(Lift::All));
        assert_eq!("GPU-a, ALL".parse(), Ok(Lift::All));
        let two: Lift = "GPU-a, GPU-b".parse().unwrap();
        assert!(two.means(&"GPU-a".parse().unwrap()) && !two.means(&"GPU-c".parse().unwrap()));
        let error = "GPU-a,3".parse::<Lift>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"3\" is no GPU; write all, or UUIDs such as GPU-5ab8... with commas"
        );
        assert!("".parse::<Lift>().is_err());
    }
}
