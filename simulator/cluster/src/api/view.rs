//! How objects are shown: whole, metadata only, or as the rows of a table, as the Accept header asks.

use serde_json::{Value, json};

use super::kinds::Kind;
use super::{events, table};

/// The forms an object can be shown in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The object.
    Whole,
    /// `PartialObjectMetadata`.
    Metadata,
    /// `Table`, what kubectl asks for.
    Table,
}

impl Form {
    /// The first form of the Accept header that is served.
    pub(super) fn accepted(accept: &str) -> Self {
        accept
            .split(',')
            .find_map(|wanted| match wanted {
                wanted if wanted.contains("as=PartialObjectMetadata") => Some(Self::Metadata),
                wanted if wanted.contains("as=Table") => Some(Self::Table),
                wanted if wanted.trim().starts_with("application/json") && !wanted.contains("as=") => {
                    Some(Self::Whole)
                }
                _ => None,
            })
            .unwrap_or(Self::Whole)
    }

    /// One object.
    pub(super) fn object(self, kind: &'static Kind, object: &Value) -> Value {
        match self {
            Self::Whole => events::to_shown(kind, object.clone()),
            Self::Metadata => json!({
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": object["metadata"],
            }),
            Self::Table => table::table(kind, [object], ""),
        }
    }

    /// A list at `revision`.
    pub(super) fn list<'a>(
        self,
        kind: &'static Kind,
        objects: impl Iterator<Item = &'a Value>,
        revision: u64,
    ) -> Value {
        let revision = revision.to_string();
        if self == Self::Table {
            return table::table(kind, objects, &revision);
        }
        let items: Vec<Value> = objects.map(|object| self.object(kind, object)).collect();
        let (list_kind, version) = match self {
            Self::Metadata => ("PartialObjectMetadataList".to_owned(), "meta.k8s.io/v1".to_owned()),
            Self::Whole | Self::Table => (format!("{}List", kind.kind), kind.api_version()),
        };
        json!({
            "kind": list_kind,
            "apiVersion": version,
            "metadata": {"resourceVersion": revision},
            "items": items,
        })
    }

    /// A bookmark at `revision`; `end_of_initial` marks the end of the state that a streaming list begins with.
    pub(super) fn bookmark(self, kind: &'static Kind, revision: u64, end_of_initial: bool) -> Value {
        let (shown_kind, version) = match self {
            Self::Metadata => ("PartialObjectMetadata", "meta.k8s.io/v1".to_owned()),
            Self::Whole | Self::Table => (kind.kind, kind.api_version()),
        };
        let mut metadata = json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
        if end_of_initial && let Some(map) = metadata.as_object_mut() {
            map.insert("annotations".into(), json!({"k8s.io/initial-events-end": "true"}));
        }
        json!({"kind": shown_kind, "apiVersion": version, "metadata": metadata})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_served_form_wins() {
        let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
        assert_eq!(Form::accepted(kubectl), Form::Table);
        let kube = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
        assert_eq!(Form::accepted(kube), Form::Metadata);
        assert_eq!(Form::accepted("application/json, */*"), Form::Whole);
        assert_eq!(Form::accepted(""), Form::Whole);
    }
}
