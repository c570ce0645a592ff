//! The record of what is wrong with each GPU and with NVML as a whole. Pure bookkeeping: what happened comes in, health with a
//! reason comes out, and equal records give equal reasons.

use std::collections::BTreeMap;

use gantry_api::DeviceHealth;
use gantry_topology::GpuUuid;

use super::Class;

/// What is wrong, by GPU and as a whole.
#[derive(Debug, Clone, Default)]
pub struct Book {
    gpus: BTreeMap<GpuUuid, Record>,
    outage: Option<Outage>,
}

/// An Xid that makes a GPU unhealthy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Its class; the worst one gives the reason.
    pub class: Class,
    /// The reason, in words a person can act on.
    pub reason: String,
}

/// Why nothing can be known of any GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outage {
    /// The driver is gone; when it is back, the GPUs have been reset.
    Driver(String),
    /// NVML fails; the GPUs may not have noticed.
    Nvml(String),
}

/// What is wrong with one GPU.
#[derive(Debug, Clone, Default)]
struct Record {
    fault: Option<Fault>,
    lost: Option<String>,
}

impl Book {
    /// Records a fault. The worst class stands, and of equals the first, so that the reason does not flap.
    pub fn fault(&mut self, gpu: &GpuUuid, fault: Fault) {
        let record = self.gpus.entry(gpu.clone()).or_default();
        if record
            .fault
            .as_ref()
            .is_none_or(|known| known.class < fault.class)
        {
            record.fault = Some(fault);
        }
    }

    /// Records that a GPU cannot be reached. The first reason stands while it is out of reach.
    pub fn lost(&mut self, gpu: &GpuUuid, reason: impl Into<String>) {
        let record = self.gpus.entry(gpu.clone()).or_default();
        record.lost.get_or_insert_with(|| reason.into());
    }

    /// Records that a GPU answers. If it was lost, it has been reset meanwhile: what was wrong before is over.
    pub fn answers(&mut self, gpu: &GpuUuid) {
        if self.gpus.get(gpu).is_some_and(|record| record.lost.is_some()) {
            self.gpus.remove(gpu);
        }
    }

    /// Records that nothing can be known. A driver that is gone stays the reason over later failures of NVML.
    pub fn outage(&mut self, outage: Outage) {
        if !matches!(self.outage, Some(Outage::Driver(_))) {
            self.outage = Some(outage);
        }
    }

    /// Records that NVML works. If the driver was gone, every GPU has been reset; those that do not answer are recorded next.
    pub fn works(&mut self) {
        if let Some(Outage::Driver(_)) = self.outage.take() {
            self.gpus.clear();
        }
    }

    /// Whether a GPU may be given out, and if not, why.
    pub fn health(&self, gpu: &GpuUuid) -> DeviceHealth {
        let record = self.gpus.get(gpu);
        let reason = match &self.outage {
            Some(Outage::Driver(reason) | Outage::Nvml(reason)) => Some(reason.clone()),
            None => record.and_then(|record| {
                let fault = record.fault.as_ref().map(|fault| fault.reason.clone());
                fault.or_else(|| record.lost.clone())
            }),
        };
        DeviceHealth {
            healthy: reason.is_none(),
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str) -> GpuUuid {
        format!("GPU-{name}").parse().unwrap()
    }

    fn fault(class: Class, reason: &str) -> Fault {
        Fault {
            class,
            reason: reason.to_owned(),
        }
    }

    fn reason(book: &Book, name: &str) -> Option<String> {
        let health = book.health(&gpu(name));
        assert_eq!(health.healthy, health.reason.is_none());
        health.reason
    }

    #[test]
    fn a_fault_is_its_own_gpus_alone() {
        let mut book = Book::default();
        book.fault(&gpu("a"), fault(Class::Fatal, "Xid 79"));
        assert_eq!(reason(&book, "a").as_deref(), Some("Xid 79"));
        assert_eq!(reason(&book, "b"), None);
    }

    #[test]
    fn the_worst_fault_gives_the_reason_and_of_equals_the_first() {
        let mut book = Book::default();
        book.fault(&gpu("a"), fault(Class::Resettable, "first"));
        book.fault(&gpu("a"), fault(Class::Resettable, "second"));
        assert_eq!(reason(&book, "a").as_deref(), Some("first"));
        book.fault(&gpu("a"), fault(Class::Fatal, "worse"));
        book.lost(&gpu("a"), "lost");
        assert_eq!(reason(&book, "a").as_deref(), Some("worse"));
    }

    #[test]
    fn a_fault_survives_a_gpu_that_only_goes_on_answering() {
        let mut book = Book::default();
        book.fault(&gpu("a"), fault(Class::Resettable, "Xid 46"));
        book.answers(&gpu("a"));
        assert_eq!(reason(&book, "a").as_deref(), Some("Xid 46"));
    }

    #[test]
    fn a_lost_gpu_that_answers_again_has_been_reset() {
        let mut book = Book::default();
        book.fault(&gpu("a"), fault(Class::Fatal, "Xid 79"));
        book.lost(&gpu("a"), "lost");
        book.answers(&gpu("a"));
        assert_eq!(reason(&book, "a"), None);
    }

    #[test]
    fn a_reloaded_driver_ends_faults_and_a_failing_nvml_does_not() {
        let mut book = Book::default();
        book.fault(&gpu("a"), fault(Class::Resettable, "Xid 46"));
        book.outage(Outage::Nvml("NVML fails".to_owned()));
        assert_eq!(reason(&book, "b").as_deref(), Some("NVML fails"));
        book.works();
        assert_eq!(reason(&book, "a").as_deref(), Some("Xid 46"));
        assert_eq!(reason(&book, "b"), None);

        book.outage(Outage::Driver("driver gone".to_owned()));
        book.outage(Outage::Nvml("NVML fails".to_owned()));
        assert_eq!(reason(&book, "b").as_deref(), Some("driver gone"));
        book.works();
        assert_eq!(reason(&book, "a"), None);
    }
}
