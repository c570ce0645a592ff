//! What a request asks for, from its method, path and query, and the refusals, each with its `Status` object. No state; a
//! path that names nothing served is a 404 here.

use std::collections::BTreeMap;

use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::kinds::Kind;

/// What a request is about.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// Everything of a kind, in one namespace or all.
    Collection {
        kind: &'static Kind,
        /// `None` means all namespaces, or a kind without any.
        namespace: Option<String>,
    },
    /// One object or a subresource of it.
    Object {
        kind: &'static Kind,
        /// Empty for kinds without namespaces.
        namespace: String,
        name: String,
        part: Part,
    },
    /// What the server offers.
    Discovery(Discovery),
}

/// An object or a subresource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// The object.
    Main,
    Status,
    /// A pod's binding.
    Binding,
}

/// The discovery documents.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Discovery {
    /// `/version`
    Version,
    /// `/healthz`, `/livez`, `/readyz`
    Health,
    /// `/openapi/v3`, `/openapi/v3/api/v1`, `/openapi/v3/apis/GROUP/VERSION`
    OpenApi {
        /// Group and version; `None` for the index.
        of: Option<(String, String)>,
    },
    /// `/api`
    CoreVersions,
    /// `/apis`
    Groups,
    /// `/api/v1`, `/apis/GROUP/VERSION`
    Resources {
        /// The group, empty for core.
        group: String,
        version: String,
    },
}

/// The query parameters that are understood; others are ignored, as a real server does.
#[derive(Debug, Default)]
pub(super) struct Query(BTreeMap<String, String>);

impl Query {
    /// Decodes the part after `?`.
    pub(super) fn parse(text: &str) -> Self {
        Self(form_urlencoded::parse(text.as_bytes()).into_owned().collect())
    }

    /// One parameter, empty if absent.
    pub(super) fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    /// Whether a parameter is `true` or `1`.
    pub(super) fn flag(&self, name: &str) -> bool {
        matches!(self.get(name), "true" | "1")
    }

    /// A number.
    ///
    /// # Errors
    /// [`ApiError::BadRequest`] for a text that is none.
    pub(super) fn number(&self, name: &str) -> Result<Option<u64>, ApiError> {
        match self.get(name) {
            "" => Ok(None),
            text => text
                .parse()
                .map(Some)
                .map_err(|_| ApiError::BadRequest(format!("{name}: {text:?} is no number"))),
        }
    }

    /// Whether the request is a dry run.
    pub(super) fn dry_run(&self) -> bool {
        self.get("dryRun") == "All"
    }
}

impl Target {
    /// Reads a path.
    ///
    /// # Errors
    /// [`ApiError::NotFound`] if nothing is served there.
    pub(super) fn parse(path: &str) -> Result<Self, ApiError> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let missing =
            || ApiError::NotFound(format!("the server could not find the requested resource {path}"));
        let target = match parts.as_slice() {
            ["version"] => Some(Self::Discovery(Discovery::Version)),
            ["healthz" | "livez" | "readyz"] => Some(Self::Discovery(Discovery::Health)),
            ["openapi", "v3"] => Some(Self::Discovery(Discovery::OpenApi { of: None })),
            ["openapi", "v3", "api", version] => Some(Self::open_api("", version)),
            ["openapi", "v3", "apis", group, version] => Some(Self::open_api(group, version)),
            ["api"] => Some(Self::Discovery(Discovery::CoreVersions)),
            ["apis"] => Some(Self::Discovery(Discovery::Groups)),
            ["api", version] => Some(Self::resources("", version)),
            ["apis", group, version] => Some(Self::resources(group, version)),
            ["api", version, rest @ ..] => Self::resource("", version, rest),
            ["apis", group, version, rest @ ..] => Self::resource(group, version, rest),
            _ => None,
        };
        target.ok_or_else(missing)
    }

    fn open_api(group: &str, version: &str) -> Self {
        Self::Discovery(Discovery::OpenApi { of: Some((group.to_owned(), version.to_owned())) })
    }

    fn resources(group: &str, version: &str) -> Self {
        Self::Discovery(Discovery::Resources { group: group.to_owned(), version: version.to_owned() })
    }

    fn resource(group: &str, version: &str, rest: &[&str]) -> Option<Self> {
        let (namespace, rest) = match rest {
            // `/namespaces/x` and `/namespaces/x/status` are the namespace itself.
            ["namespaces", namespace, plural, tail @ ..] if *plural != "status" => {
                (Some((*namespace).to_owned()), [&[*plural], tail].concat())
            }
            _ => (None, rest.to_vec()),
        };
        let (plural, tail) = rest.split_first()?;
        let kind = Kind::find(group, version, plural)?;
        if namespace.is_some() && !kind.namespaced {
            return None;
        }
        let (name, part) = match tail {
            [] => return Some(Self::Collection { kind, namespace }),
            [name] => (*name, Part::Main),
            [name, "status"] if kind.status => (*name, Part::Status),
            [name, "binding"] if kind.storage == "pods" => (*name, Part::Binding),
            _ => return None,
        };
        if kind.namespaced && namespace.is_none() {
            return None;
        }
        Some(Self::Object { kind, namespace: namespace.unwrap_or_default(), name: name.to_owned(), part })
    }
}

/// The body formats of PATCH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PatchKind {
    /// RFC 7386.
    Merge,
    /// A strategic merge patch; here a merge patch that merges conditions by type.
    Strategic,
    /// Server-side apply.
    Apply,
}

impl PatchKind {
    /// Reads the content type.
    ///
    /// # Errors
    /// [`ApiError::UnsupportedMediaType`] for any other.
    pub(super) fn parse(content_type: &str) -> Result<Self, ApiError> {
        match content_type.split(';').next().unwrap_or_default().trim() {
            "application/merge-patch+json" => Ok(Self::Merge),
            "application/strategic-merge-patch+json" => Ok(Self::Strategic),
            "application/apply-patch+yaml" => Ok(Self::Apply),
            _ => Err(ApiError::UnsupportedMediaType(
                "application/merge-patch+json, application/strategic-merge-patch+json, application/apply-patch+yaml",
            )),
        }
    }
}

/// The refusal of a method.
pub(super) fn not_allowed(method: &Method, path: &str) -> ApiError {
    ApiError::MethodNotAllowed(format!("{method} {path}"))
}

/// Why a request is refused. Code and `reason` are what Kubernetes answers in the same case.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ApiError {
    /// No such object, resource or namespace.
    #[error("{0} not found")]
    NotFound(String),
    /// Created twice.
    #[error("{0} already exists")]
    AlreadyExists(String),
    /// A precondition (UID, resourceVersion) or the state of the object forbids it.
    #[error("Operation cannot be fulfilled on {what}: {problem}")]
    Conflict { what: String, problem: String },
    /// The object is not valid.
    #[error("{what} is invalid: {problem}")]
    Invalid { what: String, problem: String },
    /// The request cannot be understood.
    #[error("{0}")]
    BadRequest(String),
    /// The revision asked for is no longer in the history.
    #[error("too old resource version: {asked} ({oldest})")]
    Gone { asked: u64, oldest: u64 },
    /// A body of a type that is not served.
    #[error("the body of the request was in an unknown format - accepted media types include: {0}")]
    UnsupportedMediaType(&'static str),
    /// A method that the resource does not have.
    #[error("{0} is not allowed here")]
    MethodNotAllowed(String),
    /// The body is beyond the limit.
    #[error("limit is {0} bytes")]
    TooLarge(usize),
}

impl ApiError {
    /// HTTP status.
    pub(super) fn code(&self) -> StatusCode {
        match self {
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::AlreadyExists(_) | Self::Conflict { .. } => StatusCode::CONFLICT,
            Self::Invalid { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::Gone { .. } => StatusCode::GONE,
            Self::UnsupportedMediaType(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::MethodNotAllowed(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
        }
    }

    /// The `reason` of the Status.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "NotFound",
            Self::AlreadyExists(_) => "AlreadyExists",
            Self::Conflict { .. } => "Conflict",
            Self::Invalid { .. } => "Invalid",
            Self::BadRequest(_) => "BadRequest",
            Self::Gone { .. } => "Expired",
            Self::UnsupportedMediaType(_) => "UnsupportedMediaType",
            Self::MethodNotAllowed(_) => "MethodNotAllowed",
            Self::TooLarge(_) => "RequestEntityTooLarge",
        }
    }

    /// The body to answer with.
    pub(super) fn status(&self) -> Value {
        json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.to_string(),
            "reason": self.reason(),
            "details": {},
            "code": self.code().as_u16(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(path: &str) -> (String, String, String, Part) {
        match Target::parse(path).unwrap() {
            Target::Object { kind, namespace, name, part } => (kind.qualified(), namespace, name, part),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn paths_name_objects_and_their_parts() {
        let found = object("/api/v1/namespaces/default/pods/a/binding");
        assert_eq!(found, ("pods".into(), "default".into(), "a".into(), Part::Binding));
        let found = object("/apis/gantry.dev/v1alpha1/gpunodes/n1/status");
        assert_eq!(found, ("gpunodes.gantry.dev".into(), String::new(), "n1".into(), Part::Status));
        let found = object("/api/v1/namespaces/default/status");
        assert_eq!(found, ("namespaces".into(), String::new(), "default".into(), Part::Status));
    }

    #[test]
    fn paths_name_collections() {
        let pods = Kind::find("", "v1", "pods").unwrap();
        let all = Target::Collection { kind: pods, namespace: None };
        assert_eq!(Target::parse("/api/v1/pods").unwrap(), all);
        let namespaces = Kind::find("", "v1", "namespaces").unwrap();
        let all = Target::Collection { kind: namespaces, namespace: None };
        assert_eq!(Target::parse("/api/v1/namespaces").unwrap(), all);
    }

    #[test]
    fn nothing_else_is_served() {
        for path in [
            "/api/v1/secrets",
            "/api/v2/pods",
            "/api/v1/pods/a",
            "/api/v1/namespaces/default/nodes/a",
            "/api/v1/namespaces/default/pods/a/log",
            "/apis/apps/v1/deployments",
            "/",
        ] {
            assert!(matches!(Target::parse(path), Err(ApiError::NotFound(_))), "{path}");
        }
    }
}
