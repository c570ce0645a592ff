//! The resources that the API server serves: names, scope, subresources, and the fields a selector may name. A closed
//! list, so that a daemon asking for anything else gets the 404 a real API server would give without the CRD.

/// One served resource in one group and version.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// API group, empty for the core group.
    pub group: &'static str,
    /// Version served.
    pub version: &'static str,
    /// `kind` of its objects.
    pub kind: &'static str,
    /// Plural name, as in paths.
    pub plural: &'static str,
    /// Short name for people.
    pub short: &'static str,
    /// Whether objects live in a namespace.
    pub namespaced: bool,
    /// Whether `status` is written through a subresource only.
    pub status: bool,
    /// Where objects are kept: two kinds with the same storage are two views of the same objects.
    pub storage: &'static str,
    /// Fields that a field selector may use, in addition to name and namespace.
    pub fields: &'static [&'static str],
}

/// Everything served. Leases and the custom resources stand in their own groups; Events in two.
pub(super) static KINDS: [Kind; 9] = [
    Kind {
        group: "",
        version: "v1",
        kind: "Namespace",
        plural: "namespaces",
        short: "ns",
        namespaced: false,
        status: true,
        storage: "namespaces",
        fields: &["status.phase"],
    },
    Kind {
        group: "",
        version: "v1",
        kind: "Node",
        plural: "nodes",
        short: "no",
        namespaced: false,
        status: true,
        storage: "nodes",
        fields: &["spec.unschedulable"],
    },
    Kind {
        group: "",
        version: "v1",
        kind: "ConfigMap",
        plural: "configmaps",
        short: "cm",
        namespaced: true,
        status: false,
        storage: "configmaps",
        fields: &[],
    },
    Kind {
        group: "",
        version: "v1",
        kind: "Pod",
        plural: "pods",
        short: "po",
        namespaced: true,
        status: true,
        storage: "pods",
        fields: &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "status.phase",
            "status.nominatedNodeName",
        ],
    },
    Kind {
        group: "",
        version: "v1",
        kind: "Event",
        plural: "events",
        short: "ev",
        namespaced: true,
        status: false,
        storage: "events",
        fields: &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "reason",
            "type",
        ],
    },
    Kind {
        group: "events.k8s.io",
        version: "v1",
        kind: "Event",
        plural: "events",
        short: "ev",
        namespaced: true,
        status: false,
        storage: "events",
        fields: &["reason", "type"],
    },
    Kind {
        group: "coordination.k8s.io",
        version: "v1",
        kind: "Lease",
        plural: "leases",
        short: "",
        namespaced: true,
        status: false,
        storage: "leases",
        fields: &[],
    },
    Kind {
        group: gantry_api::names::GROUP,
        version: "v1alpha1",
        kind: "GpuNode",
        plural: "gpunodes",
        short: "gn",
        namespaced: false,
        status: true,
        storage: "gpunodes",
        fields: &[],
    },
    Kind {
        group: gantry_api::names::GROUP,
        version: "v1alpha1",
        kind: "Gang",
        plural: "gangs",
        short: "",
        namespaced: true,
        status: true,
        storage: "gangs",
        fields: &[],
    },
];

impl Kind {
    /// `apiVersion` of its objects.
    pub(super) fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// The kind served at `group`, `version` and `plural`.
    pub(super) fn find(group: &str, version: &str, plural: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.group == group && kind.version == version && kind.plural == plural)
    }

    /// `pods`, or `gpunodes.gantry.dev`: how messages name the resource.
    pub(super) fn qualified(&self) -> String {
        if self.group.is_empty() { self.plural.to_owned() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// Whether a field selector may name `field`.
    pub(super) fn selectable(&self, field: &str) -> bool {
        field == "metadata.name"
            || (self.namespaced && field == "metadata.namespace")
            || self.fields.contains(&field)
    }
}
