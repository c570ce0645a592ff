//! Reading and writing `metadata` of untyped objects, and the merge rules of patches. Pure functions on JSON values; a
//! field of the wrong type reads as absent.

use serde_json::{Map, Value};

/// A text field of `metadata`, empty if absent.
pub(super) fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

/// Sets a text field of `metadata`.
pub(super) fn set_text(object: &mut Value, field: &str, text: String) {
    set(object, field, Value::String(text));
}

/// Sets a field of `metadata`.
pub(super) fn set(object: &mut Value, field: &str, value: Value) {
    entry(object, "metadata").insert(field.to_owned(), value);
}

/// Removes a field of `metadata`.
pub(super) fn unset(object: &mut Value, field: &str) {
    entry(object, "metadata").remove(field);
}

/// The object at `field`, made where it is missing or no object.
pub(super) fn entry<'a>(object: &'a mut Value, field: &str) -> &'a mut Map<String, Value> {
    let slot = as_map(object).entry(field).or_insert(Value::Null);
    as_map(slot)
}

fn as_map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        // The line above makes it an object.
        _ => unreachable!("the value was just made an object"),
    }
}

/// The value at a dotted path as a selector compares it; absent is the empty text.
pub(super) fn field_text(object: &Value, path: &str) -> String {
    let value = path.split('.').fold(object, |value, part| &value[part]);
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        _ => String::new(),
    }
}

/// JSON merge patch (RFC 7386). With `by_type`, lists of conditions are merged by their `type`, the one strategic rule
/// that writers of a status rely on.
pub(super) fn merge(target: &mut Value, patch: &Value, by_type: bool) {
    let Value::Object(fields) = patch else {
        *target = patch.clone();
        return;
    };
    let map = as_map(target);
    for (name, value) in fields {
        if value.is_null() {
            map.remove(name);
        } else if by_type && name == "conditions" && value.is_array() {
            merge_conditions(map.entry(name.clone()).or_insert(Value::Null), value);
        } else {
            merge(map.entry(name.clone()).or_insert(Value::Null), value, by_type);
        }
    }
}

fn merge_conditions(target: &mut Value, patch: &Value) {
    let mut conditions = target.as_array().cloned().unwrap_or_default();
    for new in patch.as_array().into_iter().flatten() {
        match conditions.iter_mut().find(|old| old["type"] == new["type"]) {
            Some(old) => merge(old, new, true),
            None => {
                let mut fresh = Value::Null;
                merge(&mut fresh, new, true);
                conditions.push(fresh);
            }
        }
    }
    *target = Value::Array(conditions);
}

/// Now, as Kubernetes writes times: RFC 3339, whole seconds.
pub(crate) fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// A fresh random UID.
pub(super) fn new_uid() -> String {
    let bits: u128 = rand::random();
    let hex = format!("{bits:032x}");
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    // Version 4, variant 8: what every reader of UUIDs accepts.
    format!("{}-{}-4{}-8{}-{}", part(0, 8), part(8, 12), part(13, 16), part(17, 20), part(20, 32))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_merge_patch_sets_removes_and_replaces() {
        let mut object = json!({"a": {"keep": 1, "drop": 2}, "list": [1, 2]});
        merge(&mut object, &json!({"a": {"drop": null, "new": 3}, "list": [9], "b": "x"}), false);
        assert_eq!(object, json!({"a": {"keep": 1, "new": 3}, "list": [9], "b": "x"}));
    }

    #[test]
    fn a_strategic_patch_merges_conditions_by_type() {
        let mut object =
            json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "x"}]}});
        let patch = json!({"status": {"conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]}});
        merge(&mut object, &patch, true);
        assert_eq!(
            object["status"]["conditions"],
            json!([{"type": "Ready", "status": "True", "reason": "x"}, {"type": "PodScheduled", "status": "True"}])
        );
    }

    #[test]
    fn uids_look_like_uuids() {
        let uid = new_uid();
        let lengths: Vec<usize> = uid.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12], "{uid}");
        assert_ne!(uid, new_uid());
    }
}
