//! Refusals of the API server, and the `Status` object each one is answered with.

use http::StatusCode;
use serde_json::{Value, json};

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
    Conflict {
        /// The object.
        what: String,
        /// What stands against it.
        problem: String,
    },
    /// The object is not valid.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// The object.
        what: String,
        /// Field and rule.
        problem: String,
    },
    /// The request cannot be understood.
    #[error("{0}")]
    BadRequest(String),
    /// The revision asked for is no longer in the history.
    #[error("too old resource version: {asked} ({oldest})")]
    Gone {
        /// The client's revision.
        asked: u64,
        /// Oldest revision that a watch may start from.
        oldest: u64,
    },
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
