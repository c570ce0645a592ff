//! The allow and deny lists: which GPUs and MIG devices may be served. And the patterns of a configuration: `*` stands
//! for anything, and the whole text must match.

use gantry_config::{Config, Selector, spelled};
use gantry_topology::{Gpu, Machine};

use crate::inventory::Unit;

/// The lists of a configuration.
pub(super) struct Selection<'c> {
    allow: &'c [Selector],
    deny: &'c [Selector],
}

impl<'c> Selection<'c> {
    /// The lists of `config`. Entries that match nothing on this machine go to `problems`.
    pub(super) fn new(
        config: &'c Config,
        machine: &Machine,
        units: &[Unit],
        problems: &mut Vec<String>,
    ) -> Self {
        for (list, selectors) in [("allow", &config.allow), ("deny", &config.deny)] {
            for (position, selector) in selectors.iter().enumerate() {
                let gpus = || machine.gpus().iter().any(|gpu| means_gpu(selector, gpu));
                let slices = || units.iter().any(|unit| means_slice(selector, unit));
                if !gpus() && !slices() {
                    problems.push(format!(
                        "devices.{list}[{position}] ({}) matches nothing on this node",
                        text(selector)
                    ));
                }
            }
        }
        Self { allow: &config.allow, deny: &config.deny }
    }

    /// Whether the GPU may be served; otherwise the reason.
    pub(super) fn gpu(&self, gpu: &Gpu) -> Result<(), String> {
        match self.deny.iter().find(|selector| means_gpu(selector, gpu)) {
            Some(selector) => Err(format!("devices.deny names it ({})", text(selector))),
            None => Ok(()),
        }
    }

    /// Whether a unit of an allowed GPU may be served; otherwise the reason.
    pub(super) fn unit(&self, gpu: &Gpu, unit: &Unit) -> Result<(), String> {
        if self.deny.iter().any(|selector| means_slice(selector, unit)) {
            return Err(format!("devices.deny names its MIG device {}", unit.id));
        }
        let allows = |selector: &Selector| means_gpu(selector, gpu) || means_slice(selector, unit);
        if self.allow.is_empty() || self.allow.iter().any(allows) {
            return Ok(());
        }
        Err(match &unit.slice {
            Some(_) => format!("devices.allow does not name its MIG device {}", unit.id),
            None => "devices.allow does not name it".to_owned(),
        })
    }
}

/// Whether the lists of a configuration allow a GPU or one of its MIG devices. Other reasons not to serve it, such as a strategy or a
/// fault, are not considered.
pub(crate) fn leaves(config: &Config, gpu: &Gpu) -> bool {
    let named_in = |list: &[Selector]| list.iter().any(|selector| means_gpu(selector, gpu));
    if named_in(&config.deny) {
        return false;
    }
    let allowed = config.allow.is_empty() || named_in(&config.allow);
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let mut slices = instances.flat_map(|instance| &instance.compute).peekable();
    if slices.peek().is_none() {
        return allowed;
    }
    slices.any(|slice| {
        let named_in = |list: &[Selector]| list.iter().any(|selector| is_uuid(selector, slice.uuid.as_str()));
        !named_in(&config.deny) && (allowed || named_in(&config.allow))
    })
}

fn means_gpu(selector: &Selector, gpu: &Gpu) -> bool {
    match selector {
        Selector::Index(index) => gpu.index == *index,
        Selector::Uuid(uuid) => gpu.uuid.as_ref().is_some_and(|own| own.as_str().eq_ignore_ascii_case(uuid)),
        Selector::BusId(address) => gpu.bus_id.as_ref() == Some(address),
        // In any case: a deny list that missed a GPU for a capital letter would give it out.
        Selector::Model(model) => {
            let own = gpu.model.as_deref().unwrap_or_default();
            matches(&model.to_lowercase(), &own.to_lowercase())
        }
    }
}

fn means_slice(selector: &Selector, unit: &Unit) -> bool {
    unit.slice.is_some() && is_uuid(selector, unit.id.as_str())
}

fn is_uuid(selector: &Selector, own: &str) -> bool {
    matches!(selector, Selector::Uuid(uuid) if own.eq_ignore_ascii_case(uuid))
}

fn text(selector: &Selector) -> String {
    match selector {
        Selector::Index(index) => format!("GPU {index}"),
        Selector::Uuid(uuid) => uuid.clone(),
        Selector::BusId(address) => address.to_string(),
        Selector::Model(model) => format!("model {model:?}"),
    }
}

/// Whether `pattern` matches the whole of `text`.
pub(super) fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut text) = text.strip_prefix(head) else {
        return false;
    };
    let mut parts = rest.split('*').peekable();
    // Each part at its earliest place, the last one at the end: if any assignment matches, this one does.
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return text.ends_with(part);
        }
        match text.find(part) {
            Some(at) => text = &text[at + part.len()..],
            None => return false,
        }
    }
    true
}

/// Whether `pattern` matches a MIG profile, in any spelling of the two.
pub(super) fn matches_profile(pattern: &str, profile: &str) -> bool {
    matches(&spelled(pattern), &spelled(profile))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pattern_matches_the_whole_text() {
        assert!(matches("*", "") && matches("*", "NVIDIA A100"));
        assert!(matches("1g.10gb", "1g.10gb"));
        assert!(!matches("1g.10gb", "1g.10gb+me"), "anchored at the end");
        assert!(!matches("A100*", "NVIDIA A100"), "and at the beginning");
        assert!(matches("*A100*80GB", "NVIDIA A100-SXM4-80GB"));
        assert!(!matches("a*a", "a"), "no character counts twice");
        assert!(!matches("", "x") && matches("", ""));
    }

    /// The definition: `*` matches nothing, or one more character.
    fn by_definition(pattern: &[u8], text: &[u8]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some((b'*', rest)) => {
                by_definition(rest, text) || (!text.is_empty() && by_definition(pattern, &text[1..]))
            }
            Some((first, rest)) => text.first() == Some(first) && by_definition(rest, &text[1..]),
        }
    }

    proptest! {
        #[test]
        fn matches_agrees_with_the_definition(pattern in "[ab*]{0,6}", text in "[ab]{0,8}") {
            prop_assert_eq!(matches(&pattern, &text), by_definition(pattern.as_bytes(), text.as_bytes()));
        }
    }
}
