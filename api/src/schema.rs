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

    /// The formats that apiextensions-apiserver knows, as far as they occur.
    #[test]
    fn the_definition_has_no_format_that_kubernetes_warns_about() {
        let mut found = Vec::new();
        formats(&serde_json::to_value(crate::GpuNode::crd()).unwrap(), &mut found);
        assert!(found.len() > 20);
        found.retain(|format| !["int32", "int64", "double", "float", "date-time"].contains(&format.as_str()));
        assert_eq!(found, Vec::<String>::new());
    }
}
