//! What a node offers in addition to the devices that Gantry accounts: amounts, labels, taints. Exact whole numbers in Kubernetes' base units.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use gantry_api::quantity;

/// No node has more of anything than a pebibyte, or a trillion cores. What claims more counts as this, so that the sum over thousands of
/// pods is still exact: a sum that stops at the largest number is not undone by taking away again what was added.
const MOST: i64 = 1 << 50;

/// Amounts of what nodes have and pods need. Resources that Gantry accounts as devices are not among them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Resources {
    /// CPU in thousandths of a core.
    pub milli_cpu: i64,
    /// Memory in bytes.
    pub memory: i64,
    /// Ephemeral storage in bytes.
    pub ephemeral: i64,
    pub pods: i64,
    /// Everything else, in its own base unit.
    pub others: BTreeMap<Arc<str>, i64>,
}

/// What a node reports of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFacts {
    pub name: Arc<str>,
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    pub taints: Vec<Taint>,
    /// `spec.unschedulable`.
    pub unschedulable: bool,
    /// `status.allocatable`.
    pub allocatable: Resources,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Taint {
    pub key: Arc<str>,
    /// Its value, perhaps empty.
    pub value: Arc<str>,
    /// What it does.
    pub effect: TaintEffect,
}

/// What a taint does to pods that do not bear it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaintEffect {
    /// New ones do not come.
    NoSchedule,
    /// They come where nothing else is left.
    PreferNoSchedule,
    /// They are sent away.
    NoExecute,
}

/// A resource of which a node has too little left, in the words of kube-scheduler.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InsufficientResource {
    /// No room for another pod, whatever it asks for.
    Pods,
    Cpu,
    Memory,
    EphemeralStorage,
    /// Another resource.
    Other(Arc<str>),
}

impl fmt::Display for InsufficientResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pods => f.write_str("Too many pods"),
            Self::Cpu => f.write_str("Insufficient cpu"),
            Self::Memory => f.write_str("Insufficient memory"),
            Self::EphemeralStorage => f.write_str("Insufficient ephemeral-storage"),
            Self::Other(name) => write!(f, "Insufficient {name}"),
        }
    }
}

impl InsufficientResource {
    /// `CPU is short`.
    pub fn short(&self) -> String {
        match self {
            Self::Pods => "the number of pods is exhausted".to_owned(),
            Self::Cpu => "CPU is short".to_owned(),
            Self::Memory => "memory is short".to_owned(),
            Self::EphemeralStorage => "ephemeral storage is short".to_owned(),
            Self::Other(name) => format!("{name} is short"),
        }
    }
}

impl Resources {
    /// Adds the quantity `written` of a resource, such as `cpu: 500m`. A quantity that cannot be read adds nothing: the API server lets
    /// none through.
    pub fn add_written(&mut self, name: &str, written: &str) {
        self.write(name, written, i64::saturating_add);
    }

    /// The same, in place of what was there.
    pub fn set_written(&mut self, name: &str, written: &str) {
        self.write(name, written, |_, amount| amount);
    }

    fn write(&mut self, name: &str, written: &str, with: fn(i64, i64) -> i64) {
        let read = if name == "cpu" { quantity::thousandths(written) } else { quantity::units(written) };
        let amount = read.unwrap_or_default();
        let place = match name {
            "cpu" => &mut self.milli_cpu,
            "memory" => &mut self.memory,
            "ephemeral-storage" => &mut self.ephemeral,
            "pods" => &mut self.pods,
            other => {
                let known = self.others.get_key_value(other);
                let name = known.map_or_else(|| other.into(), |(name, _)| Arc::clone(name));
                return self.combine_one(&name, amount, with);
            }
        };
        *place = with(*place, amount);
    }

    /// The same, with no more of anything than any node has: what a whole pod asks for, or a node reports, before it is counted
    /// with that of others.
    #[must_use]
    pub fn capped(mut self) -> Self {
        let amounts = [&mut self.milli_cpu, &mut self.memory, &mut self.ephemeral, &mut self.pods];
        for amount in amounts.into_iter().chain(self.others.values_mut()) {
            *amount = (*amount).clamp(-MOST, MOST);
        }
        self
    }

    pub fn add(&mut self, more: &Self) {
        self.combine(more, i64::saturating_add);
    }

    /// Subtracts; below zero where there was not as much.
    pub fn sub(&mut self, less: &Self) {
        self.combine(less, i64::saturating_sub);
    }

    /// The larger amount of each resource.
    pub fn raise_to(&mut self, other: &Self) {
        self.combine(other, i64::max);
    }

    fn combine(&mut self, other: &Self, with: fn(i64, i64) -> i64) {
        self.milli_cpu = with(self.milli_cpu, other.milli_cpu);
        self.memory = with(self.memory, other.memory);
        self.ephemeral = with(self.ephemeral, other.ephemeral);
        self.pods = with(self.pods, other.pods);
        for (name, amount) in &other.others {
            self.combine_one(name, *amount, with);
        }
    }

    /// Of other resources none is kept of which there is nothing: equal amounts are equal values.
    fn combine_one(&mut self, name: &Arc<str>, amount: i64, with: fn(i64, i64) -> i64) {
        match self.others.get_mut(name) {
            Some(known) => {
                *known = with(*known, amount);
                if *known == 0 {
                    self.others.remove(name);
                }
            }
            None => {
                let amount = with(0, amount);
                if amount != 0 {
                    self.others.insert(Arc::clone(name), amount);
                }
            }
        }
    }

    /// Whether `need` fits in this, which is what a node has left. What is not asked for fits though less than nothing be left.
    ///
    /// # Errors
    /// The first resource that is lacking, in a fixed order.
    pub fn fits(&self, need: &Self) -> Result<(), InsufficientResource> {
        let lacking = self.each(need).find(|(left, need, _)| need > left);
        match lacking {
            Some((_, _, lack)) => Err(lack.resource()),
            None => Ok(()),
        }
    }

    /// How many times `need` fits in this; [`u32::MAX`] if it is nothing.
    pub fn times(&self, need: &Self) -> u32 {
        let times = self.each(need).map(|(left, need, _)| left.max(0) / need).min();
        times.map_or(u32::MAX, |times| u32::try_from(times).unwrap_or(u32::MAX))
    }

    /// What is left and what is needed of every resource that is needed at all.
    fn each<'a>(&'a self, need: &'a Self) -> impl Iterator<Item = (i64, i64, ResourceKey<'a>)> {
        let others = need.others.iter().map(|(name, amount)| {
            let left = self.others.get(name).copied().unwrap_or_default();
            (left, *amount, ResourceKey::Other(name))
        });
        [
            (self.pods, need.pods, ResourceKey::Pods),
            (self.milli_cpu, need.milli_cpu, ResourceKey::Cpu),
            (self.memory, need.memory, ResourceKey::Memory),
            (self.ephemeral, need.ephemeral, ResourceKey::EphemeralStorage),
        ]
        .into_iter()
        .chain(others)
        .filter(|(_, need, _)| *need > 0)
    }
}

/// A resource, by a borrowed name.
enum ResourceKey<'a> {
    Pods,
    Cpu,
    Memory,
    EphemeralStorage,
    Other(&'a Arc<str>),
}

impl ResourceKey<'_> {
    fn resource(self) -> InsufficientResource {
        match self {
            Self::Pods => InsufficientResource::Pods,
            Self::Cpu => InsufficientResource::Cpu,
            Self::Memory => InsufficientResource::Memory,
            Self::EphemeralStorage => InsufficientResource::EphemeralStorage,
            Self::Other(name) => InsufficientResource::Other(Arc::clone(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use proptest::prelude::*;

    use super::*;

    fn read(written: &[(&str, &str)]) -> Resources {
        let mut all = Resources::default();
        for (name, quantity) in written {
            all.add_written(name, quantity);
        }
        all
    }

    #[test]
    fn what_is_lacking_is_said_in_kube_schedulers_words() {
        let left = read(&[("cpu", "2"), ("memory", "1Gi"), ("pods", "1"), ("example.com/nic", "1")]);
        for (need, words) in [
            (vec![("cpu", "2001m")], "Insufficient cpu"),
            (vec![("memory", "1025Mi")], "Insufficient memory"),
            (vec![("pods", "2"), ("cpu", "3")], "Too many pods"),
            (vec![("ephemeral-storage", "1")], "Insufficient ephemeral-storage"),
            (vec![("example.com/nic", "2")], "Insufficient example.com/nic"),
            (vec![("hugepages-2Mi", "2Mi")], "Insufficient hugepages-2Mi"),
        ] {
            assert_eq!(left.fits(&read(&need)).unwrap_err().to_string(), words);
        }
        assert_eq!(left.fits(&left), Ok(()));
    }

    #[test]
    fn exhausted_resource_does_not_matter_to_pods_without_request() {
        let mut left = read(&[("cpu", "1"), ("memory", "1Gi")]);
        left.sub(&read(&[("cpu", "2")]));
        assert_eq!(left.milli_cpu, -1000);
        assert_eq!(left.fits(&read(&[("memory", "1Gi")])), Ok(()));
        assert_eq!(left.times(&read(&[("cpu", "1")])), 0);
        assert_eq!(left.times(&Resources::default()), u32::MAX);
    }

    prop_compose! {
        fn amounts_within(range: RangeInclusive<i64>)(
            cpu in range.clone(), memory in range.clone(), ephemeral in range.clone(), pods in range.clone(), nics in prop::option::of(range),
        ) -> Resources {
            Resources {
                milli_cpu: cpu,
                memory,
                ephemeral,
                pods,
                others: nics.into_iter().map(|nics| ("example.com/nic".into(), nics)).collect(),
            }
        }
    }

    fn amounts() -> impl Strategy<Value = Resources> {
        amounts_within(0..=49)
    }

    fn any_amounts() -> impl Strategy<Value = Resources> {
        amounts_within(i64::MIN..=i64::MAX)
    }

    proptest! {
        #[test]
        fn times_is_how_often_it_fits_when_taken_one_after_another(left in amounts(), need in amounts()) {
            let times = left.times(&need);
            let mut rest = left;
            let mut fitted = 0;
            while fitted < 100 && rest.fits(&need).is_ok() {
                rest.sub(&need);
                fitted += 1;
            }
            prop_assert_eq!(times.min(100), fitted);
        }

        #[test]
        fn what_thousands_take_and_give_back_leaves_what_was(
            left in any_amounts(), needs in prop::collection::vec(any_amounts(), 0..8), each in 0..1000u32,
        ) {
            let mut rest = Resources::default();
            rest.add(&left.capped());
            let before = rest.clone();
            let needs: Vec<Resources> = needs.into_iter().map(Resources::capped).collect();
            for _ in 0..each {
                needs.iter().for_each(|need| rest.sub(need));
            }
            for _ in 0..each {
                needs.iter().for_each(|need| rest.add(need));
            }
            prop_assert_eq!(rest, before);
        }

        #[test]
        fn what_is_taken_and_given_back_leaves_what_was(left in amounts(), need in amounts()) {
            let mut rest = Resources::default();
            rest.add(&left);
            let before = rest.clone();
            rest.sub(&need);
            rest.add(&need);
            prop_assert_eq!(rest, before);
        }
    }
}
