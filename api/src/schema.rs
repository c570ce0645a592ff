//! Rewrites the schemas that schemars generates into the form that Kubernetes requires.

use schemars::Schema;

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
