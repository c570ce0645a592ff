//! The JSON schema of the config file, generated from its types. The reader takes the known keys from here, so that schema, reference
//! and reader agree.

use std::borrow::Cow;
use std::sync::LazyLock;

use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings, json_schema};
use serde_json::{Value, json};

use super::file::{File, VALUED};
use super::settings::SETTINGS;
use super::tree::{Step, below};
use super::value::{ChannelIds, Replicas, Resource, SleepInterval, Strategies};
use super::{ReplicatedDevices, Selector, Strategy};

/// The section that is read only to report that it is not served.
const REFUSED: &str = "sharing.mps";

/// The schema of a config file, for editors and pipelines.
pub fn json_schema() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let mut schema = SchemaGenerator::new(settings).into_root_schema_for::<File>();
    schema.insert("title".to_owned(), "gantry plugin configuration".into());
    let mut schema = schema.to_value();
    // The command line and the reference have the same descriptions.
    for setting in SETTINGS.iter() {
        if let Some(Value::Object(property)) = schema.pointer_mut(&pointer(setting.key)) {
            property.insert("description".to_owned(), format!("{}.", setting.help).into());
        }
    }
    if let Some(version) = schema.pointer_mut("/properties/version/anyOf") {
        let versions = version.as_array_mut();
        versions.into_iter().for_each(|versions| versions.push(empty_word()));
    }
    nullable(&mut schema, true);
    without_value(&mut schema, "");
    if let Some(Value::Object(refused)) = schema.pointer_mut(&pointer(REFUSED)) {
        // Its keys stay, because the reader reports wrong ones in it too.
        refused.insert("not".to_owned(), json!({"type": "object"}));
    }
    schema
}

/// An empty text, which counts as unset.
fn empty_word() -> Value {
    json!({"type": "string", "maxLength": 0})
}

/// Sets for every property below `schema` whether it may be null. As in the reader it may, and counts as absent, unless it is required or
/// one of [`VALUED`].
fn without_value(schema: &mut Value, form: &str) {
    if let Some(kinds) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        kinds.iter_mut().for_each(|kind| without_value(kind, form));
    }
    if let Some(items) = schema.get_mut("items") {
        without_value(items, &format!("{form}[]"));
    }
    let required = schema.get("required").cloned().unwrap_or_default();
    let is_required = |key: &str| {
        let mut keys = required.as_array().into_iter().flatten();
        keys.any(|name| name == key)
    };
    let properties = schema.get_mut("properties").and_then(Value::as_object_mut);
    for (key, property) in properties.into_iter().flatten() {
        let form = below(form, key);
        let must = VALUED.contains(&form.as_str());
        nullable(property, !must && !is_required(key));
        if must && property.get("type") == Some(&"string".into()) {
            property["minLength"] = 1.into();
        }
        without_value(property, &form);
    }
}

/// Sets whether null is allowed.
fn nullable(schema: &mut Value, allowed: bool) {
    let nothing = json!("null");
    if let Some(kinds) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        kinds.retain(|kind| kind.get("type") != Some(&nothing));
        if allowed {
            kinds.push(json!({"type": nothing}));
        }
    } else if let Some(kind) = schema.get_mut("type") {
        let own = kind.as_array().and_then(|kinds| kinds.first()).unwrap_or(kind).clone();
        *kind = if allowed { json!([own, nothing]) } else { own };
    }
}

/// The JSON pointer to the property of a dotted key.
fn pointer(key: &str) -> String {
    key.split('.').map(|name| format!("/properties/{name}")).collect()
}

/// [`json_schema`], made once: it depends on the types alone, and takes longer than reading a file.
pub(super) fn known() -> &'static Value {
    static KNOWN: LazyLock<Value> = LazyLock::new(json_schema);
    &KNOWN
}

/// The properties of `schema`, if it allows an object.
pub(super) fn properties(schema: &Value) -> Option<&serde_json::Map<String, Value>> {
    alternatives(schema).find_map(|schema| schema.get("properties")?.as_object())
}

/// The schema of the elements, if `schema` allows a list.
pub(super) fn items(schema: &Value) -> Option<&Value> {
    alternatives(schema).find_map(|schema| schema.get("items"))
}

/// Every place of the file with a key of this name, with `[]` after lists.
pub(super) fn places(key: &str) -> Vec<String> {
    let mut places = Vec::new();
    collect(known(), "", key, &mut places);
    places
}

fn collect(schema: &Value, at: &str, key: &str, places: &mut Vec<String>) {
    for (name, schema) in properties(schema).into_iter().flatten() {
        let at = below(at, name);
        if at == REFUSED {
            continue;
        }
        if name == key {
            places.push(at.clone());
        }
        match items(schema) {
            Some(items) => collect(items, &format!("{at}[]"), key, places),
            None => collect(schema, &at, key, places),
        }
    }
}

/// The words allowed at `path` below `schema`; empty if other values are allowed too.
pub(super) fn words(schema: &Value, path: &[Step]) -> Vec<String> {
    at(schema, path).and_then(own_words).unwrap_or_default()
}

/// The first required key of an entry of the list at `path` below `schema`.
pub(super) fn first_key<'s>(schema: &'s Value, path: &[Step]) -> Option<&'s str> {
    let required = items(at(schema, path)?)?.get("required")?;
    required.get(0)?.as_str()
}

fn at<'s>(schema: &'s Value, path: &[Step]) -> Option<&'s Value> {
    path.iter().try_fold(schema, |schema, step| match step {
        Step::Key(key) => properties(schema)?.get(key),
        Step::Index(_) => items(schema),
    })
}

fn own_words(schema: &Value) -> Option<Vec<String>> {
    let word = |value: &Value| value.as_str().map(str::to_owned);
    if let Some(list) = schema.get("enum").and_then(Value::as_array) {
        return list.iter().filter(|value| !value.is_null()).map(word).collect();
    }
    if let Some(only) = schema.get("const") {
        return word(only).map(|word| vec![word]);
    }
    let list = schema.get("oneOf").or_else(|| schema.get("anyOf"))?.as_array()?;
    let mut words = Vec::new();
    for schema in list {
        if schema.get("type").and_then(Value::as_str) != Some("null") && *schema != empty_word() {
            words.extend(own_words(schema)?);
        }
    }
    Some(words)
}

fn alternatives(schema: &Value) -> impl Iterator<Item = &Value> {
    let any = schema.get("anyOf").and_then(Value::as_array);
    std::iter::once(schema).chain(any.into_iter().flatten())
}

/// A resource name of [`Resource`]: a DNS name, with or without the domain.
const NAME: &str = r"^(nvidia\.com/)?[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$";
/// An interval of [`SleepInterval`]: a Go duration, a number of nanoseconds, or infinite.
const INTERVAL: &str = r"^(infinite|\+?[0-9]+|\+?(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$";

/// Implements `JsonSchema` for types that serde converts from another type.
macro_rules! form {
    ($type:ty, $name:literal, $schema:expr) => {
        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                $name.into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                $schema
            }
        }
    };
}

form!(
    Resource,
    "Resource",
    json_schema!({"type": "string", "maxLength": 63, "pattern": NAME, "examples": ["nvidia.com/gpu"]})
);
form!(Replicas, "Replicas", json_schema!({"type": "integer", "minimum": 2, "maximum": u16::MAX}));
form!(
    Strategies,
    "Strategies",
    json_schema!({"anyOf": [
        {"enum": Strategy::ALL.map(Strategy::word)},
        {"type": "array", "minItems": 1, "items": {"enum": Strategy::ALL.map(Strategy::word)}},
    ]})
);
form!(ChannelIds, "ChannelIds", json_schema!({"type": "array", "maxItems": 1, "items": {"const": 0}}));
form!(
    SleepInterval,
    "SleepInterval",
    json_schema!({"anyOf": [
        {"type": "string", "pattern": INTERVAL, "examples": ["60s", "infinite"]},
        {"type": "integer", "minimum": 0, "description": "Nanoseconds."},
    ]})
);
form!(
    ReplicatedDevices,
    "SharedOf",
    json_schema!({"anyOf": [
        {"const": "all"},
        {"type": "integer", "minimum": 1, "maximum": u16::MAX},
        {"type": "array", "items": {"anyOf": [
            {"type": "integer", "minimum": 0, "maximum": u8::MAX},
            {"type": "string", "examples": ["0:1", "GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c"]},
        ]}},
    ]})
);
form!(
    Selector,
    "Selector",
    json_schema!({"anyOf": [
        {"type": "integer", "minimum": 0, "maximum": u8::MAX},
        {"type": "string", "minLength": 1, "examples": ["0000:3b:00.0", "NVIDIA A100*"]},
    ]})
);

#[cfg(test)]
mod tests {
    use super::super::{Strictness, load};
    use super::*;

    #[test]
    fn schema_describes_settings_as_help_does() {
        let schema = json_schema();
        for setting in SETTINGS.iter() {
            let property = schema.pointer(&pointer(setting.key)).unwrap();
            assert_eq!(property["description"], format!("{}.", setting.help), "{}", setting.key);
        }
    }

    /// Whether the schema has null at a dotted path, `[]` for the elements of a list.
    fn takes_null(form: &str) -> bool {
        let place = form
            .replace("[]", ".[]")
            .split('.')
            .filter(|step| !step.is_empty())
            .map(|step| match step {
                "[]" => "/items".to_owned(),
                key => format!("/properties/{key}"),
            })
            .collect::<String>();
        let schema = json_schema();
        let schema = schema.pointer(&place).unwrap_or_else(|| panic!("{form}"));
        let null = json!("null");
        let kinds = schema["type"].as_array().into_iter().flatten();
        let any = schema["anyOf"].as_array().into_iter().flatten();
        kinds.chain(any.map(|kind| &kind["type"])).any(|kind| *kind == null)
    }

    #[test]
    fn schema_allows_null_where_reader_does() {
        let read = |text: &str| load("a.yaml", text, &[], Strictness::Strict).map(drop);
        for (form, text) in [
            ("", ""),
            ("flags", "flags:"),
            ("flags.plugin", "flags: {plugin: null}"),
            ("flags.plugin.deviceListStrategy", "flags: {plugin: {deviceListStrategy: }}"),
            ("devices", "devices:"),
            ("devices.deny", "devices: {deny: }"),
            ("resources", "resources:"),
            ("resources.gpus", "resources: {gpus: }"),
            ("resources.gpus[].name", "resources: {gpus: [{pattern: '*', name: }]}"),
            ("sharing", "sharing:"),
            ("sharing.timeSlicing", "sharing: {timeSlicing: }"),
            ("sharing.timeSlicing.resources", "sharing: {timeSlicing: {resources: }}"),
            (
                "sharing.timeSlicing.resources[].devices",
                "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: }]}}",
            ),
            (
                "sharing.timeSlicing.resources[].rename",
                "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, rename: }]}}",
            ),
            ("version", "version:"),
        ] {
            let read = read(text);
            assert_eq!(takes_null(form), read.is_ok(), "{form}: {read:?}");
        }
    }

    #[test]
    fn schema_allows_empty_version_and_no_empty_name() {
        assert!(load("a.yaml", "version: ''", &[], Strictness::Strict).is_ok());
        let schema = json_schema();
        let versions = schema["properties"]["version"]["anyOf"].as_array().unwrap();
        assert!(versions.contains(&empty_word()), "{versions:?}");
        assert_eq!(words(&schema, &[Step::Key("version".into())]), ["v1"]);
        let share =
            &schema["properties"]["sharing"]["properties"]["timeSlicing"]["properties"]["resources"]["items"];
        assert_eq!(share["properties"]["rename"]["minLength"], 1);
    }

    #[test]
    fn schema_is_made_once() {
        assert_eq!(*known(), json_schema());
        assert!(std::ptr::eq(known(), known()));
    }
}
