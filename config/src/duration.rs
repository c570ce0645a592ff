//! Durations as Go writes them, for NVIDIA's files and flags mean them so: `60s`, `1h15m30.5s`, and a bare number is nanoseconds.

use std::time::Duration;

/// Nanoseconds of every unit, longest names first so that `ms` is not read as `m`.
const UNITS: [(&str, u64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// A text that is no duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no duration; write a number and a unit (ns, us, ms, s, m, h), such as 60s or 1m30s, or infinite"
)]
pub(super) struct DurationError {
    text: String,
}

/// Reads `text`; negative durations are refused, and what is longer than a `u64` of nanoseconds (584 years) as well.
///
/// # Errors
/// It is no duration.
pub(super) fn parse(text: &str) -> Result<Duration, DurationError> {
    let nanoseconds = match text.parse() {
        Ok(bare) => Some(bare),
        Err(_) => sum(text.strip_prefix('+').unwrap_or(text)),
    };
    nanoseconds
        .map(Duration::from_nanos)
        .ok_or_else(|| DurationError {
            text: text.to_owned(),
        })
}

/// The shortest text that [`parse`] reads as `duration`, in one unit.
pub(super) fn text(duration: Duration) -> String {
    let nanoseconds = duration.as_nanos();
    ["h", "m", "s", "ms", "us", "ns"]
        .iter()
        .filter_map(|name| UNITS.iter().find(|(unit, _)| unit == name))
        .find(|(_, size)| nanoseconds.is_multiple_of(u128::from(*size)))
        .map_or(format!("{nanoseconds}ns"), |(unit, size)| match nanoseconds {
            0 => "0s".to_owned(),
            _ => format!("{}{unit}", nanoseconds / u128::from(*size)),
        })
}

fn sum(text: &str) -> Option<u64> {
    let mut rest = text;
    let mut total = 0u64;
    while !rest.is_empty() {
        let end = rest.find(|ch: char| !ch.is_ascii_digit() && ch != '.')?;
        let (number, tail) = rest.split_at(end);
        let (unit, size) = UNITS.iter().find(|(unit, _)| tail.starts_with(unit))?;
        total = total.checked_add(scaled(number, *size)?)?;
        rest = tail.strip_prefix(unit)?;
    }
    (!text.is_empty()).then_some(total)
}

/// `number`, which may have a fraction, times `size`; what is below a nanosecond is cut off.
fn scaled(number: &str, size: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let whole = match whole {
        "" => 0,
        digits => digits.parse::<u64>().ok()?,
    };
    let mut part = 0;
    let mut weight = size;
    for digit in fraction.chars() {
        weight /= 10;
        part += u64::from(digit.to_digit(10)?) * weight;
    }
    whole.checked_mul(size)?.checked_add(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_add_up_and_a_bare_number_is_nanoseconds() {
        for (text, milliseconds) in [
            ("60s", 60_000),
            ("1h15m30.5s", 4_530_500),
            ("1.5h", 5_400_000),
            ("250ms", 250),
            ("+2m", 120_000),
            (".5s", 500),
            ("60000000000", 60_000),
            ("0", 0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        assert_eq!(parse("3us"), parse("3µs"));
    }

    #[test]
    fn what_is_no_duration_is_refused() {
        for text in [
            "",
            "s",
            "1",
            "-1s",
            "1 s",
            "1x",
            "1s2",
            "1..5s",
            "99999999999h",
            "infinite",
        ] {
            let bare = text == "1";
            assert_eq!(parse(text).is_ok(), bare, "{text}");
        }
    }

    #[test]
    fn what_is_written_reads_the_same() {
        for nanoseconds in [
            0,
            1,
            1_500,
            60_000_000_000,
            90_000_000_000,
            3_600_000_000_000,
            1_000_001,
        ] {
            let duration = Duration::from_nanos(nanoseconds);
            assert_eq!(parse(&text(duration)), Ok(duration), "{}", text(duration));
        }
        assert_eq!(text(Duration::from_secs(60)), "1m");
    }
}
