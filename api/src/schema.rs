//! The shape of the schemas as Kubernetes wants it. Nothing but a rewriting of what schemars makes of our types.

use schemars::Schema;

/// Rewrites number formats that Kubernetes does not know (`uint8`, ...) into those that it does: the API server warns about each unknown one
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

    /// The formats that apiextensions-apiserver knows, as far as they occur.
    #[test]
    fn the_definitions_have_no_format_that_kubernetes_warns_about() {
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

    /// A schema that names properties and forbids others is none that Kubernetes takes: it prunes what is not named.
    #[test]
    fn the_definitions_are_structural() {
        for definition in definitions() {
            let mut found = Vec::new();
            field(&definition, "additionalProperties", &mut found);
            assert!(!found.contains(&&Value::Bool(false)), "{found:?}");
        }
    }

    #[test]
    fn a_list_of_gangs_shows_how_far_each_is_and_why_it_is_no_further() {
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
        let wanted = [
            "Phase", "Min", "Members", "Bound", "Domain", "Waiting", "Reason", "Age",
        ];
        assert_eq!(shown, wanted);
        let mut subresources = Vec::new();
        field(&gang, "subresources", &mut subresources);
        assert!(subresources[0]["status"].is_object());
        let mut rules = Vec::new();
        field(&gang, "x-kubernetes-validations", &mut rules);
        assert_eq!(rules.len(), 1, "the spec's");
    }
}
