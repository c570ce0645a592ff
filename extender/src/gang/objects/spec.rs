//! Reads the spec of a Gang strictly. An invalid field is a fault with its path, its value and the nearest valid name,
//! and the whole spec is ignored. The API server refuses most of these; with an older resource definition it may not.

use gantry_api::GangSpec;
use gantry_gang::Fault;
use serde::Deserialize;
use serde_json::{Value, json};

/// The fields and their allowed values.
const FIELDS: [(&str, &str); 9] = [
    ("minMember", "a whole number, 1 or more"),
    ("maxMember", "a whole number, 1 or more"),
    ("level", "{name: LEVEL, required: true or false}"),
    ("sliceSize", "a whole number, 1 or more"),
    ("rails", "Any, Same or RequireSame"),
    ("spares", "a whole number, 0 to 64"),
    ("repair", "Hold, Restart or Ignore"),
    ("arrivalSeconds", "whole seconds, 1 to 3600"),
    ("restartHoldSeconds", "whole seconds, 0 to 3600"),
];
/// Largest edit distance of a suggested name.
const NEAR: usize = 4;
/// Longest value that a fault quotes.
const SHOWN: usize = 60;

/// Reads the spec of the Gang `name`.
pub(super) fn read(name: &str, spec: &Value) -> Result<GangSpec, Fault> {
    let fields = match spec {
        Value::Null => return Ok(GangSpec::default()),
        Value::Object(fields) => fields,
        other => return Err(fault(name, "", format!("{} is no object", shown(other)))),
    };
    for (field, value) in fields {
        let Some((_, allowed)) = FIELDS.iter().find(|(known, _)| known == field) else {
            let names: Vec<&str> = FIELDS.iter().map(|(known, _)| *known).collect();
            let near = nearest(field, &names);
            let words = format!("there is no such field{near}; there are {}", names.join(", "));
            return Err(fault(name, field, words));
        };
        let alone = GangSpec::deserialize(json!({ field: value }));
        if !alone.as_ref().is_ok_and(is_in_range) {
            let near = match (field.as_str(), value.as_str()) {
                ("rails", Some(word)) => nearest(word, &["Any", "Same", "RequireSame"]),
                ("repair", Some(word)) => nearest(word, &["Hold", "Restart", "Ignore"]),
                _ => String::new(),
            };
            let words = format!("{} is not allowed{near}; write {allowed}", shown(value));
            return Err(fault(name, field, words));
        }
    }
    let read = GangSpec::deserialize(spec).map_err(|error| fault(name, "", error.to_string()))?;
    if let (Some(min), Some(max)) = (read.min_member, read.max_member)
        && min > max
    {
        let words = format!("{min} is more than maxMember, which is {max}");
        return Err(fault(name, "minMember", words));
    }
    Ok(read)
}

fn is_in_range(spec: &GangSpec) -> bool {
    let counts = [spec.min_member, spec.max_member, spec.slice_size];
    counts.iter().flatten().all(|count| *count >= 1)
        && spec.arrival_seconds.is_none_or(|seconds| (1..=3600).contains(&seconds))
        && spec.spares.is_none_or(|spares| spares <= 64)
        && spec.restart_hold_seconds.is_none_or(|seconds| seconds <= 3600)
        && spec.level.as_ref().is_none_or(|level| !level.name.is_empty())
}

fn fault(name: &str, field: &str, words: String) -> Fault {
    let place = match field {
        "" => format!("spec of Gang {name}"),
        field => format!("spec.{field} of Gang {name}"),
    };
    Fault { place: place.into(), words: words.into() }
}

fn nearest(word: &str, names: &[&str]) -> String {
    let distance =
        |name: &&&str| strsim::damerau_levenshtein(&name.to_ascii_lowercase(), &word.to_ascii_lowercase());
    let near = names.iter().min_by_key(distance);
    near.filter(|name| distance(name) <= NEAR)
        .map_or(String::new(), |name| format!(" (nearest name: {name})"))
}

fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use gantry_api::{GangLevel, GangRails, GangRepair};

    use super::*;

    #[test]
    fn what_is_right_is_read() {
        let spec = json!({
            "minMember": 4, "maxMember": 8, "level": {"name": "rack", "required": true},
            "sliceSize": 2, "rails": "RequireSame", "spares": 1, "repair": "Restart", "arrivalSeconds": 30, "restartHoldSeconds": 0,
        });
        let wanted = GangSpec {
            min_member: Some(4),
            max_member: Some(8),
            level: Some(GangLevel { name: "rack".into(), required: true }),
            slice_size: Some(2),
            rails: Some(GangRails::RequireSame),
            spares: Some(1),
            repair: Some(GangRepair::Restart),
            arrival_seconds: Some(30),
            restart_hold_seconds: Some(0),
        };
        assert_eq!(read("train", &spec), Ok(wanted));
        assert_eq!(read("train", &Value::Null), Ok(GangSpec::default()));
        assert_eq!(read("train", &json!({"minMember": null})), Ok(GangSpec::default()));
    }

    #[test]
    fn spec_error_names_the_field_and_the_nearest_valid_value() {
        // An error names the field, its value and what is allowed. If a name is misspelled, it also names the
        // nearest valid one.
        let said = |spec: Value| read("train", &spec).unwrap_err().to_string();
        assert_eq!(
            said(json!({"minMembers": 4})),
            "spec.minMembers of Gang train: there is no such field (nearest name: minMember); there are minMember, maxMember, level, \
             sliceSize, rails, spares, repair, arrivalSeconds, restartHoldSeconds"
        );
        assert_eq!(
            said(json!({"repair": "restart"})),
            "spec.repair of Gang train: \"restart\" is not allowed (nearest name: Restart); write Hold, Restart or Ignore"
        );
        assert_eq!(
            said(json!({"minMember": 0})),
            "spec.minMember of Gang train: 0 is not allowed; write a whole number, 1 or more"
        );
        assert_eq!(
            said(json!({"level": "rack"})),
            "spec.level of Gang train: \"rack\" is not allowed; write {name: LEVEL, required: true or false}"
        );
        assert_eq!(
            said(json!({"arrivalSeconds": 4000})),
            "spec.arrivalSeconds of Gang train: 4000 is not allowed; write whole seconds, 1 to 3600"
        );
        assert_eq!(
            said(json!({"minMember": 9, "maxMember": 8})),
            "spec.minMember of Gang train: 9 is more than maxMember, which is 8"
        );
        assert_eq!(said(json!([1])), "spec of Gang train: [1] is no object");
    }
}
