//! Label and field selectors of list and watch requests.

use serde_json::Value;

use super::kinds::Kind;
use super::meta;
use super::request::ApiError;

/// A condition on objects; all its terms must hold. Empty selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Selector {
    terms: Vec<Term>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Term {
    Field { path: String, value: String, equal: bool },
    Label { key: String, values: Option<Vec<String>>, within: bool },
}

impl Selector {
    /// Reads the two query parameters.
    ///
    /// # Errors
    /// [`ApiError::BadRequest`] for a text that is no selector or a field that `kind` cannot be selected by.
    pub(super) fn parse(kind: &Kind, fields: &str, labels: &str) -> Result<Self, ApiError> {
        let mut terms = Vec::new();
        for text in fields.split(',').filter(|text| !text.is_empty()) {
            terms.push(field_term(kind, text)?);
        }
        for text in split_labels(labels) {
            terms.push(label_term(text)?);
        }
        Ok(Self { terms })
    }

    /// Whether it selects `object`.
    pub(super) fn matches(&self, object: &Value) -> bool {
        self.terms.iter().all(|term| term.holds(object))
    }
}

impl Term {
    fn holds(&self, object: &Value) -> bool {
        match self {
            Self::Field { path, value, equal } => (meta::field_text(object, path) == *value) == *equal,
            Self::Label { key, values, within } => {
                let label = object["metadata"]["labels"][key.as_str()].as_str();
                let found = match values {
                    None => label.is_some(),
                    Some(values) => label.is_some_and(|label| values.iter().any(|value| value == label)),
                };
                found == *within
            }
        }
    }
}

fn field_term(kind: &Kind, text: &str) -> Result<Term, ApiError> {
    let (path, value, equal) = comparison(text).ok_or_else(|| {
        ApiError::BadRequest(format!("invalid field selector {text:?}: write field=value or field!=value"))
    })?;
    if !kind.selectable(path) {
        return Err(ApiError::BadRequest(format!("field label not supported: {path}")));
    }
    Ok(Term::Field { path: path.to_owned(), value: value.to_owned(), equal })
}

fn label_term(text: &str) -> Result<Term, ApiError> {
    let text = text.trim();
    let set = |key: &str, list: &str, within: bool| Term::Label {
        key: key.trim().to_owned(),
        values: Some(list.trim_end_matches(')').split(',').map(|value| value.trim().to_owned()).collect()),
        within,
    };
    if let Some((key, list)) = text.split_once(" notin (") {
        return Ok(set(key, list, false));
    }
    if let Some((key, list)) = text.split_once(" in (") {
        return Ok(set(key, list, true));
    }
    if let Some((key, value, equal)) = comparison(text) {
        return Ok(set(key, value, equal));
    }
    let (key, within) = text.strip_prefix('!').map_or((text, true), |key| (key, false));
    if key.is_empty() || key.contains(char::is_whitespace) {
        return Err(ApiError::BadRequest(format!("unable to parse label selector {text:?}")));
    }
    Ok(Term::Label { key: key.to_owned(), values: None, within })
}

/// `key`, `value` and whether they shall be equal, of `key=value`, `key==value` or `key!=value`.
fn comparison(text: &str) -> Option<(&str, &str, bool)> {
    if let Some((key, value)) = text.split_once("!=") {
        return Some((key.trim(), value.trim(), false));
    }
    let (key, value) = text.split_once('=')?;
    Some((key.trim(), value.strip_prefix('=').unwrap_or(value).trim(), true))
}

/// Splits at commas outside brackets.
fn split_labels(text: &str) -> impl Iterator<Item = &str> {
    let mut open = false;
    text.split(move |c| {
        match c {
            '(' => open = true,
            ')' => open = false,
            _ => {}
        }
        c == ',' && !open
    })
    .filter(|part| !part.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn selects(fields: &str, labels: &str) -> bool {
        let kind = Kind::find("", "v1", "pods").unwrap();
        let pod = json!({
            "metadata": {"name": "a", "labels": {"app": "train", "tier": "gold"}},
            "spec": {"nodeName": "n1"}, "status": {"phase": "Running"},
        });
        Selector::parse(kind, fields, labels).unwrap().matches(&pod)
    }

    #[test]
    fn field_selectors_compare_and_join() {
        assert!(selects("spec.nodeName=n1,status.phase!=Succeeded,status.phase!=Failed", ""));
        assert!(!selects("spec.nodeName=n2", ""));
        assert!(!selects("status.phase!=Running", ""));
        assert!(selects("metadata.name==a", ""));
        assert!(selects("status.nominatedNodeName=", ""), "an absent field is the empty text");
    }

    #[test]
    fn label_selectors_compare_and_test_sets() {
        assert!(selects("", "app=train,tier in (gold, silver)"));
        assert!(!selects("", "tier notin (gold,silver)"));
        assert!(selects("", "app,!queue"));
        assert!(selects("", "queue!=x"), "an absent label differs from every value");
        assert!(!selects("", "queue"));
    }

    #[test]
    fn unknown_field_selector_is_refused() {
        let kind = Kind::find("", "v1", "pods").unwrap();
        let refused = Selector::parse(kind, "spec.gpus=1", "").unwrap_err();
        assert_eq!(refused, ApiError::BadRequest("field label not supported: spec.gpus".into()));
    }
}
