//! Single values of a config file with a form of their own. Each is read from a JSON value, so that the same rules hold in YAML, in JSON
//! and on the command line.

use std::time::Duration;

use gantry_api::{ResourceName, names};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::{DeviceRef, Gfd, ReplicatedDevices, Selector, Strategy, problem};

/// Longest resource name, with its domain.
const MAX_NAME: usize = 63;

/// A resource: `gpu` or `nvidia.com/gpu`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Resource(pub ResourceName);

impl TryFrom<String> for Resource {
    type Error = String;

    /// Adds a missing domain, and checks what Kubernetes and NVIDIA's plugin allow.
    fn try_from(text: String) -> Result<Self, String> {
        let domain = names::RESOURCE_DOMAIN;
        let rest = match text.split_once('/') {
            Some((found, rest)) if found == domain => rest,
            Some((found, _)) => {
                return Err(format!(
                    "{text:?} is not in the domain {domain}: {found:?} cannot be served; write a name such as {domain}/gpu or gpu"
                ));
            }
            None => &text,
        };
        let full = format!("{domain}/{rest}");
        if full.len() > MAX_NAME {
            return Err(format!("{full:?} has {} characters; {MAX_NAME} are allowed", full.len()));
        }
        if !names::is_subdomain(rest) {
            let meant = mig_resource(&text).map(|meant| format!("; did you mean {meant:?}?"));
            return Err(format!(
                "{text:?} is no resource name; after {domain}/ lower-case letters, digits, - and . are allowed, with a letter or digit at both ends of every part{}",
                meant.unwrap_or_default()
            ));
        }
        Ok(Self(full.into()))
    }
}

/// A MIG profile, or a pattern of profiles, as resource names spell it: `1g.5gb.me` for NVML's `1g.5gb+me`, for `MIG 1g.5gb+me` as
/// nvidia-smi prints it and for `nvidia.com/mig-1g.5gb.me`.
pub fn spelled(profile: &str) -> String {
    let name = profile
        .strip_prefix(names::RESOURCE_DOMAIN)
        .and_then(|name| name.strip_prefix('/'))
        .unwrap_or(profile);
    let is_marked = name.get(..3).is_some_and(|mark| mark.eq_ignore_ascii_case("mig"));
    let bare = name.get(3..).filter(|_| is_marked);
    let bare = bare.and_then(|bare| bare.strip_prefix(['-', ' '])).unwrap_or(name);
    bare.replace('+', ".")
}

/// The default resource of a MIG profile, if `name` is a profile in any spelling: `nvidia.com/mig-1g.5gb.me` for `1g.5gb+me`, `MIG 1g.5gb+me` and `mig-1g.5gb+me`.
pub(super) fn mig_resource(name: &str) -> Option<String> {
    let profile = spelled(name);
    let mut parts = profile.split('.').peekable();
    let counted = |part: &str, unit: &str| {
        let digits = part.strip_suffix(unit).unwrap_or_default();
        !digits.is_empty() && digits.chars().all(|ch| ch.is_ascii_digit())
    };
    parts.next_if(|part| counted(part, "c"));
    let slices = parts.next()?;
    let memory = parts.next()?;
    let memory = memory.split_once('-').map_or(memory, |(memory, _)| memory);
    let known = counted(slices, "g") && counted(memory, "gb");
    known.then(|| format!("{}/mig-{profile}", names::RESOURCE_DOMAIN))
}

/// Deserializes a [`Resource`].
pub(super) fn resource<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ResourceName, D::Error> {
    Resource::deserialize(deserializer).map(|Resource(name)| name)
}

/// [`resource`] for an optional key.
pub(super) fn some_resource<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<ResourceName>, D::Error> {
    resource(deserializer).map(Some)
}

/// Deserializes [`Replicas`].
pub(super) fn replicas<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    Replicas::deserialize(deserializer).map(|Replicas(replicas)| replicas)
}

/// Replicas of one device: 2 or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
pub struct Replicas(pub u16);

impl TryFrom<Value> for Replicas {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        if let Value::String(text) = &value
            && let Ok(number) = text.trim().parse::<u16>()
        {
            return Err(format!("{value} is a text, and a number belongs here; drop the quotes: {number}"));
        }
        whole(&value)
            .and_then(|number| u16::try_from(number).ok())
            .filter(|replicas| *replicas >= 2)
            .map(Self)
            .ok_or_else(|| {
                format!("{value} replicas are not possible; write 2 to {}, or leave the entry out for a device that is not shared", u16::MAX)
            })
    }
}

/// The device list strategies: one, or a list. Sorted, without repetition, not empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value")]
pub struct Strategies(pub Vec<Strategy>);

impl TryFrom<Value> for Strategies {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        let words = match &value {
            Value::Array(list) => list.iter().collect(),
            one => vec![one],
        };
        let mut strategies = words
            .into_iter()
            .map(|word| match word {
                Value::String(word) => strategy(word),
                other => strategy(&other.to_string()),
            })
            .collect::<Result<Vec<_>, _>>()?;
        if strategies.is_empty() {
            let words = Strategy::ALL.map(Strategy::word).join(", ");
            return Err(format!("the list is empty; allowed: {words}"));
        }
        strategies.sort_unstable();
        strategies.dedup();
        Ok(Self(strategies))
    }
}

/// IMEX channels: none, or channel 0. NVIDIA's plugin has no other either.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Value>", into = "Vec<Value>")]
pub struct ChannelIds(pub bool);

impl TryFrom<Vec<Value>> for ChannelIds {
    type Error = String;

    fn try_from(list: Vec<Value>) -> Result<Self, String> {
        match list.as_slice() {
            [] => Ok(Self(false)),
            [only] if whole(only) == Some(0) => Ok(Self(true)),
            _ => Err(format!("{} is not allowed; write [] or [0]", Value::from(list))),
        }
    }
}

impl From<ChannelIds> for Vec<Value> {
    fn from(channels: ChannelIds) -> Self {
        if channels.0 { vec![Value::from(0)] } else { Vec::new() }
    }
}

/// Interval between two computations of the labels; `None`: never again. Written as a Go duration (`1h15m30.5s`), as a bare number of
/// nanoseconds, or as `infinite`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "String")]
pub struct SleepInterval(pub Option<Duration>);

/// The units of Go durations in nanoseconds, largest first. No unit is the beginning of a later one that a text could mean.
const UNITS: [(&str, u64); 8] = [
    ("h", 3_600_000_000_000),
    ("ms", 1_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ns", 1),
];

impl SleepInterval {
    /// Whether it is below the shortest interval in use.
    pub(super) fn is_short(self) -> bool {
        self.0.is_some_and(|interval| interval < Gfd::SHORTEST)
    }
}

impl TryFrom<Value> for SleepInterval {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        let text = match &value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if text == "infinite" {
            return Ok(Self(None));
        }
        let nanoseconds = whole(&value).or_else(|| text.parse().ok()).or_else(|| go_duration(&text));
        let interval = nanoseconds.map(Duration::from_nanos).ok_or_else(|| {
            format!("{text:?} is no duration; write a number and a unit (ns, us, ms, s, m, h), such as 60s or 1m30s, or infinite")
        })?;
        Ok(Self(Some(interval)))
    }
}

impl From<SleepInterval> for String {
    /// In one unit, the largest that gives a whole number.
    fn from(SleepInterval(interval): SleepInterval) -> Self {
        let Some(interval) = interval else {
            return "infinite".to_owned();
        };
        let nanoseconds = interval.as_nanos();
        let mut units = ["h", "m", "s", "ms", "us", "ns"]
            .iter()
            .filter_map(|name| UNITS.iter().find(|(unit, _)| unit == name));
        match units.find(|(_, size)| nanoseconds.is_multiple_of(u128::from(*size))) {
            Some((unit, size)) if nanoseconds > 0 => format!("{}{unit}", nanoseconds / u128::from(*size)),
            _ => "0s".to_owned(),
        }
    }
}

/// The nanoseconds of a duration as Go writes it; `None` for a negative one, and for more than a `u64` holds (584 years). kube's own
/// reader of Go durations panics on such texts.
pub(super) fn go_duration(text: &str) -> Option<u64> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    let mut total = None;
    while !rest.is_empty() {
        let (number, tail) = rest.split_at(rest.find(|ch: char| !ch.is_ascii_digit() && ch != '.')?);
        let (unit, size) = UNITS.iter().find(|(unit, _)| tail.starts_with(unit))?;
        #[expect(clippy::cast_precision_loss, reason = "units are powers and small multiples of ten")]
        let nanoseconds = (number.parse::<f64>().ok()? * *size as f64).round();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and in range"
        )]
        let nanoseconds = (nanoseconds < 1.8e19).then_some(nanoseconds as u64)?;
        total = Some(total.unwrap_or(0u64).checked_add(nanoseconds)?);
        rest = tail.strip_prefix(unit)?;
    }
    total
}

impl TryFrom<Value> for ReplicatedDevices {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{value} are no devices; write all, how many (1 or more), or a list of indices (0), MIG indices (\"0:1\") and UUIDs"
            )
        };
        match &value {
            Value::String(word) if word == "all" => Ok(Self::All),
            Value::Array(list) => {
                list.iter().map(DeviceRef::try_from).collect::<Result<_, _>>().map(Self::Listed)
            }
            other => whole(other)
                .and_then(|count| u16::try_from(count).ok())
                .filter(|count| *count > 0)
                .map(Self::Count)
                .ok_or_else(wrong),
        }
    }
}

impl From<ReplicatedDevices> for Value {
    fn from(devices: ReplicatedDevices) -> Self {
        match devices {
            ReplicatedDevices::All => Self::from("all"),
            ReplicatedDevices::Count(count) => Self::from(count),
            ReplicatedDevices::Listed(list) => list
                .iter()
                .map(|device| match device {
                    DeviceRef::Gpu(index) => Self::from(*index),
                    other => Self::from(other.to_string()),
                })
                .collect(),
        }
    }
}

impl TryFrom<&Value> for DeviceRef {
    type Error = String;

    fn try_from(value: &Value) -> Result<Self, String> {
        let text = match value {
            Value::String(text) => text.trim().to_owned(),
            other => other.to_string(),
        };
        let reference = match (text.split_once(':'), uuid(&text)) {
            (Some((gpu, mig)), _) => {
                gpu.parse().ok().zip(mig.parse().ok()).map(|(gpu, mig)| Self::Mig(gpu, mig))
            }
            (None, Some(uuid)) => Some(Self::Uuid(uuid?)),
            (None, None) => text.parse().ok().map(Self::Gpu),
        };
        reference.ok_or_else(|| {
            format!("{value} is no device; write an index (0), a MIG index (\"0:1\") or a UUID (GPU-... or MIG-...)")
        })
    }
}

impl TryFrom<Value> for Selector {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        let text = match &value {
            Value::String(text) => text.trim().to_owned(),
            Value::Number(number) => number.to_string(),
            _ => String::new(),
        };
        if let Ok(index) = text.parse() {
            return Ok(Self::Index(index));
        }
        if let Some(uuid) = uuid(&text) {
            return uuid.map(Self::Uuid);
        }
        if let Some(meant) = nearly_uuid(&text) {
            return Err(format!("{value} names no GPU; did you mean {meant}?"));
        }
        if text.contains(':') {
            // As lspci prints it: domain 0000 is left out.
            let address = text.parse().or_else(|_| format!("0000:{text}").parse());
            return address.map(Self::BusId).map_err(|_| {
                format!("{value} is no PCIe address; write 0000:3b:00.0 or 3b:00.0. A MIG device is named by its UUID (MIG-...)")
            });
        }
        // Anything else is a model: a typing error cannot be distinguished from another model.
        let digits = text.chars().all(|ch| ch.is_ascii_digit() || ch == '-' || ch == '.');
        if digits {
            return Err(format!(
                "{value} names no GPU; write an index (0), a UUID (GPU-... or MIG-...), a PCIe address (0000:3b:00.0) or a model, where * stands for anything"
            ));
        }
        Ok(Self::Model(text))
    }
}

impl From<Selector> for Value {
    fn from(selector: Selector) -> Self {
        match selector {
            Selector::Index(index) => Self::from(index),
            Selector::Uuid(text) | Selector::Model(text) => Self::from(text),
            Selector::BusId(address) => Self::from(address.as_str()),
        }
    }
}

/// The UUID of a GPU or MIG device, if `text` begins like one, or its problem.
fn uuid(text: &str) -> Option<Result<String, String>> {
    let (prefix, rest) = text.split_at_checked(4)?;
    let (kind, is_one) = match prefix {
        "GPU-" => ("GPU", is_full_uuid(rest)),
        "MIG-" => ("MIG device", is_full_uuid(rest) || is_older_mig(rest)),
        _ => return None,
    };
    Some(match is_one {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "{text:?} is no UUID of a {kind}; write it in full, as nvidia-smi -L prints it: {prefix} and 8-4-4-4-12 hexadecimal digits"
        )),
    })
}

/// Whether a text is 8-4-4-4-12 hexadecimal digits. NVML's values are read by looser rules; a typing error would match nothing.
fn is_full_uuid(text: &str) -> bool {
    text.split('-').map(str::len).eq([8, 4, 4, 4, 12])
        && text.chars().all(|ch| ch.is_ascii_hexdigit() || ch == '-')
}

/// Whether a text is what follows `MIG-` before driver 470: `GPU-<uuid>/<gpu instance>/<compute instance>`.
fn is_older_mig(text: &str) -> bool {
    let is_number = |part: &str| part.parse::<u16>().is_ok();
    match text.split('/').collect::<Vec<_>>().as_slice() {
        [gpu, instance, compute] => {
            gpu.strip_prefix("GPU-").is_some_and(is_full_uuid) && is_number(instance) && is_number(compute)
        }
        _ => false,
    }
}

/// The complete UUID for one without its prefix, or with a prefix in another case.
fn nearly_uuid(text: &str) -> Option<String> {
    let (first, rest) = text.split_once('-')?;
    for prefix in ["GPU", "MIG"] {
        if first.eq_ignore_ascii_case(prefix) {
            return Some(format!("{prefix}-{rest}"));
        }
    }
    is_full_uuid(text).then(|| format!("GPU-{text}"))
}

/// A whole number, also as `4.0`.
fn whole(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked to be whole and in range"
        )]
        (number.fract() == 0.0 && (0.0..1e15).contains(&number)).then_some(number as u64)
    })
}

fn strategy(word: &str) -> Result<Strategy, String> {
    let words = Strategy::ALL.map(Strategy::word);
    let found = Strategy::ALL.into_iter().find(|strategy| strategy.word() == word);
    found.ok_or_else(|| {
        let fault = problem::Fault::UnknownWord {
            found: word.to_owned(),
            nearest: problem::nearest(word, words),
            allowed: words.map(str::to_owned).to_vec(),
        };
        fault.to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(text: &str) -> Result<Duration, String> {
        SleepInterval::try_from(Value::from(text)).map(|SleepInterval(interval)| interval.unwrap())
    }

    #[test]
    fn go_durations_add_up_and_bare_number_is_nanoseconds() {
        for (text, milliseconds) in [
            ("60s", 60_000),
            ("1h15m30.5s", 4_530_500),
            ("1.5h", 5_400_000),
            ("250ms", 250),
            ("1.001s", 1_001),
            ("+2m", 120_000),
            (".5s", 500),
            ("60000000000", 60_000),
            ("0", 0),
        ] {
            assert_eq!(interval(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        assert_eq!(interval("3us"), interval("3µs"));
    }

    #[test]
    fn text_that_is_no_duration_is_refused() {
        for text in ["", "+", "s", "-1s", "1 s", "1x", "1s2", "1..5s", ".s", "1s-2s", "99999999999h", "nans"]
        {
            assert!(interval(text).is_err(), "{text}");
        }
    }

    #[test]
    fn written_interval_reads_the_same() {
        for nanoseconds in [0, 1, 1_500, 60_000_000_000, 90_000_000_000, 3_600_000_000_000, 1_000_001] {
            let duration = Duration::from_nanos(nanoseconds);
            let text = String::from(SleepInterval(Some(duration)));
            assert_eq!(interval(&text), Ok(duration), "{text}");
        }
        assert_eq!(String::from(SleepInterval(Some(Duration::from_secs(60)))), "1m");
    }
}
