//! The JSON schema of the config file, made from its types. The strict reader looks up here which keys there are, so that
//! schema, reference and reader cannot part.

use std::borrow::Cow;
use std::sync::LazyLock;

use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings, json_schema};
use serde_json::Value;

use super::file::File;
use super::settings::SETTINGS;
use super::tree::Step;
use super::value::{ChannelIds, Replicas, Resource, SleepInterval, Strategies};
use super::{Selector, SharedOf, Strategy};

/// The schema of a config file, for editors and pipelines.
pub fn json_schema() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let mut schema = SchemaGenerator::new(settings).into_root_schema_for::<File>();
    schema.insert("title".to_owned(), "gantry plugin configuration".into());
    let mut schema = schema.to_value();
    // What a setting means is said once, for the command line and the reference too.
    for setting in SETTINGS {
        if let Some(Value::Object(property)) = schema.pointer_mut(&pointer(setting.key)) {
            property.insert("description".to_owned(), format!("{}.", setting.help).into());
        }
    }
    schema
}

/// Where the schema has the property of a dotted key.
fn pointer(key: &str) -> String {
    key.split('.').map(|name| format!("/properties/{name}")).collect()
}

/// [`json_schema`], made once: it follows from the types alone, and making it takes longer than reading a file by it.
pub(super) fn known() -> &'static Value {
    static KNOWN: LazyLock<Value> = LazyLock::new(json_schema);
    &KNOWN
}

/// The properties of the object that `schema` allows, if it allows one.
pub(super) fn properties(schema: &Value) -> Option<&serde_json::Map<String, Value>> {
    alternatives(schema).find_map(|schema| schema.get("properties")?.as_object())
}

/// What the elements of the list look like that `schema` allows, if it allows one.
pub(super) fn items(schema: &Value) -> Option<&Value> {
    alternatives(schema).find_map(|schema| schema.get("items"))
}

/// The words allowed at `path` below `schema`; empty where something else than words is allowed too.
pub(super) fn words(schema: &Value, path: &[Step]) -> Vec<String> {
    let Some((step, rest)) = path.split_first() else {
        return own_words(schema).unwrap_or_default();
    };
    let child = match step {
        Step::Key(key) => properties(schema).and_then(|properties| properties.get(key)),
        Step::Index(_) => items(schema),
    };
    child.map_or(Vec::new(), |child| words(child, rest))
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
        if schema.get("type").and_then(Value::as_str) != Some("null") {
            words.extend(own_words(schema)?);
        }
    }
    Some(words)
}

fn alternatives(schema: &Value) -> impl Iterator<Item = &Value> {
    let any = schema.get("anyOf").and_then(Value::as_array);
    std::iter::once(schema).chain(any.into_iter().flatten())
}

/// Implements `JsonSchema` for types whose form serde cannot tell.
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
    json_schema!({"type": "string", "maxLength": 63, "examples": ["nvidia.com/gpu"]})
);
form!(
    Replicas,
    "Replicas",
    json_schema!({"type": "integer", "minimum": 2, "maximum": u16::MAX})
);
form!(
    Strategies,
    "Strategies",
    json_schema!({"anyOf": [
        {"enum": Strategy::ALL.map(Strategy::word)},
        {"type": "array", "minItems": 1, "items": {"enum": Strategy::ALL.map(Strategy::word)}},
    ]})
);
form!(
    ChannelIds,
    "ChannelIds",
    json_schema!({"type": "array", "maxItems": 1, "items": {"const": 0}})
);
form!(
    SleepInterval,
    "SleepInterval",
    json_schema!({"anyOf": [
        {"type": "string", "examples": ["60s", "infinite"]},
        {"type": "integer", "minimum": 0, "description": "Nanoseconds."},
    ]})
);
form!(
    SharedOf,
    "SharedOf",
    json_schema!({"anyOf": [
        {"const": "all"},
        {"type": "integer", "minimum": 1, "maximum": u16::MAX},
        {"type": "array", "minItems": 1, "items": {"anyOf": [
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
    use super::*;

    #[test]
    fn the_schema_says_of_every_setting_what_the_command_line_and_the_reference_say() {
        let schema = json_schema();
        for setting in SETTINGS {
            let property = schema.pointer(&pointer(setting.key)).unwrap();
            assert_eq!(
                property["description"],
                format!("{}.", setting.help),
                "{}",
                setting.key
            );
        }
    }

    #[test]
    fn the_schema_is_made_once_for_all_files_that_are_read() {
        assert_eq!(*known(), json_schema());
        assert!(std::ptr::eq(known(), known()));
    }
}
