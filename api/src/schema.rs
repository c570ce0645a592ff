//! Rewrites the schemas that schemars generates into the form that Kubernetes requires.

use schemars::Schema;
use serde_json::Value;

/// Replaces number formats that Kubernetes does not know (`uint8`, ...). The API server warns about each unknown format
/// whenever the definition is applied. The bounds stay in `minimum` and `maximum`.
pub(crate) fn known_formats(schema: &mut Schema) {
    let known = match schema.get("format").and_then(|format| format.as_str()) {
        Some("uint8" | "uint16" | "int8" | "int16") => "int32",
        Some("uint32" | "uint64" | "uint") => "int64",
        _ => return,
    };
    schema.insert("format".to_owned(), known.into());
}

/// Longest string without a bound of its own, in characters.
const MAX_STRING: u32 = 4096;
/// Longest list without a bound of its own: as many devices as 32 GPUs with 7 MIG devices in 36 replicas each.
const MAX_LIST: u32 = 8192;
/// Most entries of a map without a bound of its own.
const MAX_MAP: u32 = 256;

/// Bounds every string, list and map, so that the extender's memory is safe from a plugin.
pub(crate) fn bounded(schema: &mut Schema) {
    let is = |kind: &str| match schema.get("type") {
        Some(Value::String(one)) => one == kind,
        Some(Value::Array(several)) => several.iter().any(|one| one == kind),
        _ => false,
    };
    let is_free_text = is("string") && schema.get("enum").is_none() && schema.get("format").is_none();
    let is_map = schema.get("additionalProperties").is_some_and(Value::is_object);
    let bounds = [
        (is_free_text, "maxLength", MAX_STRING),
        (is("array"), "maxItems", MAX_LIST),
        (is_map, "maxProperties", MAX_MAP),
    ];
    for (applies, bound, most) in bounds {
        if applies && schema.get(bound).is_none() {
            schema.insert(bound.to_owned(), most.into());
        }
    }
}

/// Removes from a value the fields of objects that its schema does not have.
pub(crate) fn retain_known(value: &mut Value, schema: &Value) {
    let alternatives =
        ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|name| schema.get(name)?.as_array());
    let schemas: Vec<&Value> = std::iter::once(schema).chain(alternatives.flatten()).collect();
    match value {
        Value::Object(fields) => {
            let properties = schemas.iter().filter_map(|schema| schema.get("properties")?.as_object());
            let known: Vec<_> = properties.collect();
            // A map has any names.
            if !known.is_empty() {
                fields.retain(|name, _| known.iter().any(|properties| properties.contains_key(name)));
            }
            for (name, field) in fields {
                let schemas = known.iter().filter_map(|properties| properties.get(name));
                schemas.for_each(|schema| retain_known(field, schema));
            }
        }
        Value::Array(items) => {
            for schema in schemas.iter().filter_map(|schema| schema.get("items")) {
                items.iter_mut().for_each(|item| retain_known(item, schema));
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use kube::CustomResourceExt;
    use serde_json::Value;

    fn formats(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                if let Some(Value::String(format)) = fields.get("format") {
                    found.push(format.clone());
                }
                fields.values().for_each(|field| formats(field, found));
            }
            Value::Array(items) => items.iter().for_each(|item| formats(item, found)),
            _ => {}
        }
    }

    fn definitions() -> [Value; 2] {
        [crate::GpuNode::crd(), crate::Gang::crd()].map(|crd| serde_json::to_value(crd).unwrap())
    }

    /// Parts of a schema that have no bound.
    fn unbounded(path: &str, schema: &Value, found: &mut Vec<String>) {
        let bound = match schema["type"].as_str() {
            Some("string") => Some("maxLength"),
            Some("array") => Some("maxItems"),
            Some("object") if schema["additionalProperties"].is_object() => Some("maxProperties"),
            _ => None,
        };
        let is_bounded = ["enum", "format"].iter().any(|name| !schema[*name].is_null());
        found.extend(bound.filter(|bound| !is_bounded && schema[*bound].is_null()).map(|_| path.to_owned()));
        assert!(schema["x-kubernetes-preserve-unknown-fields"].is_null(), "{path}");
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            unbounded(&format!("{path}.{name}"), field, found);
        }
        for part in ["items", "additionalProperties"] {
            if let Some(inner) = schema.get(part) {
                unbounded(&format!("{path}.{part}"), inner, found);
            }
        }
    }

    /// A plugin may be in the wrong hands: etcd bounds the size of an object, and this the parts of it.
    #[test]
    fn every_part_of_a_gpu_node_is_bounded() {
        let definition = &definitions()[0];
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let mut found = Vec::new();
        for part in ["spec", "status"] {
            assert!(schema["properties"][part]["properties"].is_object(), "{part}");
            unbounded(part, &schema["properties"][part], &mut found);
        }
        assert_eq!(found, Vec::<String>::new());
        let machine = &schema["properties"]["spec"]["properties"]["machine"]["properties"];
        assert_eq!(machine["gpus"]["maxItems"], gantry_topology::machine::MAX_GPUS);
    }

    /// The list has the formats of apiextensions-apiserver that occur in the definitions.
    #[test]
    fn definitions_use_only_known_formats() {
        let mut found = Vec::new();
        formats(&definitions()[0], &mut found);
        assert!(found.len() > 20);
        formats(&definitions()[1], &mut found);
        assert!(found.len() > 30);
        found.retain(|format| !["int32", "int64", "double", "float", "date-time"].contains(&format.as_str()));
        assert_eq!(found, Vec::<String>::new());
    }

    fn field<'a>(value: &'a Value, name: &str, found: &mut Vec<&'a Value>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get(name));
                fields.values().for_each(|value| field(value, name, found));
            }
            Value::Array(items) => items.iter().for_each(|item| field(item, name, found)),
            _ => {}
        }
    }

    /// Kubernetes refuses a schema that forbids additional properties. It prunes unknown fields instead.
    #[test]
    fn definitions_are_structural() {
        for definition in definitions() {
            let mut found = Vec::new();
            field(&definition, "additionalProperties", &mut found);
            assert!(!found.contains(&&Value::Bool(false)), "{found:?}");
        }
    }

    #[test]
    fn gang_columns_show_phase_counts_and_reason() {
        let [_, gang] = definitions();
        let mut columns = Vec::new();
        field(&gang, "additionalPrinterColumns", &mut columns);
        let shown: Vec<&str> = columns[0]
            .as_array()
            .unwrap()
            .iter()
            .filter(|column| column.get("priority").is_none())
            .map(|column| column["name"].as_str().unwrap())
            .collect();
        let wanted = ["Phase", "Min", "Members", "Bound", "Domain", "Waiting", "Reason", "Age"];
        assert_eq!(shown, wanted);
        let mut subresources = Vec::new();
        field(&gang, "subresources", &mut subresources);
        assert!(subresources[0]["status"].is_object());
        let mut rules = Vec::new();
        field(&gang, "x-kubernetes-validations", &mut rules);
        assert_eq!(rules.len(), 1, "the spec's");
    }
}
