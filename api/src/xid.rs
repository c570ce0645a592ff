//! Xids and their classes, from `data/xid.csv` (its first line names the sources). To change the effect of an
//! Xid, change its row.

use std::fmt;

const CSV: &str = include_str!("../data/xid.csv");

/// The effect of an Xid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Caused by the application, or without consequences: the GPU stays healthy.
    Application,
    /// A link failed. With `reset` only a GPU reset restores it; otherwise the driver's recovery action and the
    /// state of the links decide.
    Link {
        /// Whether the GPU itself must be reset.
        reset: bool,
    },
    /// Memory failed, confined to the MIG instance that the event names; without one, the whole GPU is
    /// affected.
    MigInstance,
    /// The GPU is unusable until it is reset.
    Resettable,
    /// Only a reboot or a repair helps.
    Fatal,
}

impl Class {
    /// Whether a whole GPU with such an Xid is unhealthy.
    pub fn is_unhealthy(self) -> bool {
        match self {
            Self::Application | Self::Link { reset: false } => false,
            Self::Link { reset: true } | Self::MigInstance | Self::Resettable | Self::Fatal => true,
        }
    }

    /// Whether links may have changed.
    pub fn touches_links(self) -> bool {
        matches!(self, Self::Link { .. })
    }

    /// The class with this name; `None` if it is unknown to this version.
    pub fn named(name: &str) -> Option<Self> {
        let classes =
            [Self::Application, Self::Link { reset: true }, Self::MigInstance, Self::Resettable, Self::Fatal];
        classes.into_iter().find(|class| class.to_string() == name)
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Application => "application",
            Self::Link { .. } => "link",
            Self::MigInstance => "mig-instance",
            Self::Resettable => "resettable",
            Self::Fatal => "fatal",
        })
    }
}

/// One Xid of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xid {
    /// Its number.
    pub code: u64,
    /// NVIDIA's description, or its name in the driver's header.
    pub meaning: &'static str,
    /// Its effect.
    pub class: Class,
    /// What the operator should do, by the immediate action of NVIDIA's catalog.
    pub response: &'static str,
    /// Whether it is confined to the MIG instance that the event names.
    pub contained: bool,
    /// Whether NVML reports its condition as a state: memory errors, repairs, recovery actions.
    pub has_state: bool,
}

/// All Xids known to this build.
#[derive(Debug, Clone)]
pub struct Table(Vec<Xid>);

impl Table {
    /// The table that is built in.
    pub fn built_in() -> Self {
        let mut rows: Vec<Xid> = CSV.lines().filter_map(read_row).collect();
        rows.sort_by_key(|xid| xid.code);
        Self(rows)
    }

    /// Every Xid, by number.
    pub fn all(&self) -> &[Xid] {
        &self.0
    }

    /// The Xid with this number, if known.
    pub fn get(&self, code: u64) -> Option<&Xid> {
        let position = self.0.binary_search_by_key(&code, |xid| xid.code).ok()?;
        self.0.get(position)
    }

    /// The class of an Xid. An unknown Xid counts as a fault: losing a GPU is better than a broken job.
    pub fn class(&self, code: u64) -> Class {
        self.get(code).map_or(Class::Resettable, |xid| xid.class)
    }

    /// Whether an event of this Xid is confined to the MIG instance that it names.
    pub fn is_contained(&self, code: u64) -> bool {
        self.get(code).is_some_and(|xid| xid.contained)
    }

    /// Whether NVML reports the condition of this Xid as a state: memory errors, repairs, recovery actions.
    pub fn has_state(&self, code: u64) -> bool {
        self.get(code).is_some_and(|xid| xid.has_state)
    }

    /// Whether this Xid concerns memory, which all compute instances of a GPU instance share.
    pub fn is_shared(&self, code: u64) -> bool {
        self.get(code).is_some_and(|xid| xid.class == Class::MigInstance || xid.has_state)
    }

    /// What the operator should do about an Xid that makes a GPU unhealthy. `None` if the table has it as one of
    /// applications, of which the operator made a fault.
    pub fn response(&self, code: u64) -> Option<&'static str> {
        match self.get(code) {
            Some(xid) => (xid.class != Class::Application).then_some(xid.response),
            None => Some(response("", Class::Resettable)),
        }
    }

    /// Description, e.g. `Xid 79: GPU has fallen off the bus`.
    pub fn describe(&self, code: u64) -> String {
        match self.get(code) {
            Some(xid) => format!("Xid {code}: {}", xid.meaning),
            None => format!("Xid {code}: unknown to this version"),
        }
    }
}

/// Parses one line; comments and the heading are not rows.
fn read_row(line: &'static str) -> Option<Xid> {
    let fields = fields(line);
    let [code, mnemonic, meaning, scope, action, _, _, verdict] = fields[..] else {
        return None;
    };
    let class = class(scope, action, verdict);
    Some(Xid {
        code: code.parse().ok()?,
        meaning: match meaning {
            "Unused" => "unexpected, NVIDIA lists it as unused",
            meaning if meaning.starts_with('(') => mnemonic,
            meaning => meaning,
        },
        class,
        response: response(action, class),
        contained: !scope.starts_with("uncontained")
            && (scope.contains("MIG instance") || verdict.contains("MIG instance only")),
        has_state: scope.contains("memory") || scope.contains("contained") || action == "XID_154",
    })
}

/// What the operator should do.
fn response(action: &str, class: Class) -> &'static str {
    match action {
        "RESTART_APP" if class == Class::Application => "none for the GPU; restart the job if it failed",
        "RESTART_APP" => "drain the GPU, reset it, and restart the job",
        "IGNORE" => "none",
        "RESET_GPU" => "drain the GPU and reset it",
        "RESTART_BM" => "drain the node and reboot it; replace the board if it repeats",
        "RESTART_VM" => "drain the node and restart the virtual machine",
        "CHECK_MECHANICALS" => "check the power cables of the board, then reboot",
        "UPDATE_SWFW" => "update driver and firmware",
        "CHECK_UVM" => "check whether nvidia_uvm is loaded; restart the job, and reset the GPU if it repeats",
        "WORKFLOW_XID_45" => "look at the Xid before it; alone, check the job",
        "WORKFLOW_XID_48" => "drain the GPU and reset it; replace the board if it repeats",
        "WORKFLOW_NVLINK_ERR" | "WORKFLOW_NVLINK5_ERR" => {
            "look at the links (nvidia-smi nvlink -s) and the fabric manager's log; reset the GPU if links stay down"
        }
        "XID_154" => "do what the driver requests (nvidia-smi -q, GPU Recovery Action)",
        _ => match class {
            Class::Application => "none",
            Class::Link { .. } => {
                "look at the links (nvidia-smi nvlink -s); reset the GPU if links stay down"
            }
            Class::MigInstance | Class::Resettable => {
                "drain the GPU and reset it; contact NVIDIA or the vendor if it repeats"
            }
            Class::Fatal => "drain the node and reboot it; contact NVIDIA or the vendor if it repeats",
        },
    }
}

/// The class that follows from the columns.
fn class(scope: &str, action: &str, verdict: &str) -> Class {
    if verdict.starts_with("ignore") {
        Class::Application
    } else if verdict.starts_with("keep GPU") {
        Class::Link { reset: action == "RESET_GPU" }
    } else if scope.contains("MIG instance") && verdict.contains("MIG instance") {
        Class::MigInstance
    } else if verdict.contains("only after reset/reboot") {
        Class::Fatal
    } else {
        Class::Resettable
    }
}

/// The fields of a CSV line; quoted fields may contain commas.
fn fields(line: &'static str) -> Vec<&'static str> {
    let mut fields = Vec::new();
    let mut rest = line;
    loop {
        let quoted = rest.strip_prefix('"').and_then(|inner| inner.split_once('"'));
        let (field, tail) = match quoted {
            Some((field, tail)) => (field, tail.strip_prefix(',')),
            None => match rest.split_once(',') {
                Some((field, tail)) => (field, Some(tail)),
                None => (rest, None),
            },
        };
        fields.push(field);
        match tail {
            Some(tail) => rest = tail,
            None => return fields,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_contains_every_csv_row() {
        let rows = CSV
            .lines()
            .filter(|line| !line.starts_with('#') && !line.starts_with("xid,") && !line.is_empty());
        let table = Table::built_in();
        let codes: Vec<u64> = table.0.iter().map(|xid| xid.code).collect();
        assert_eq!(codes.len(), rows.clone().count());
        assert_eq!(codes, (1..=176).collect::<Vec<_>>(), "each Xid once, none left out");
        for line in rows {
            let verdict = fields(line)[7];
            let xid = read_row(line).unwrap();
            let means = match xid.class {
                Class::Application => "ignore (count it)",
                Class::Link { .. } => "keep GPU; drop the link",
                Class::Fatal => "GPU unhealthy; recover only after reset/reboot",
                Class::MigInstance | Class::Resettable => "unhealthy",
            };
            assert!(verdict.contains(means), "{line}");
            assert!(!xid.meaning.is_empty(), "{line}");
        }
    }

    #[test]
    fn xid_classes_match_nvidia() {
        let table = Table::built_in();
        for code in [13, 14, 31, 43, 45, 68, 94, 108, 109, 137, 154] {
            assert_eq!(table.class(code), Class::Application, "{code}");
        }
        for code in [54, 79, 119, 143, 167] {
            assert_eq!(table.class(code), Class::Fatal, "{code}");
        }
        for code in [46, 62, 64, 95, 140] {
            assert_eq!(table.class(code), Class::Resettable, "{code}");
        }
        for code in [48, 171, 172] {
            assert_eq!(table.class(code), Class::MigInstance, "{code}");
        }
        // Power smoothing wears out: the GPU still computes, and no reset restores it.
        for code in 162..=165 {
            assert_eq!(table.class(code), Class::Application, "{code}");
        }
        assert_eq!(table.class(74), Class::Link { reset: false });
        assert_eq!(table.class(155), Class::Link { reset: true });
        assert_eq!(table.class(4711), Class::Resettable, "fail safe");
    }

    #[test]
    fn reset_xids_are_ignored_only_if_nvidia_does() {
        for line in CSV.lines() {
            if let [code, _, _, _, "RESET_GPU", _, "no", _] = fields(line)[..] {
                let class = read_row(line).unwrap().class;
                assert_ne!(class, Class::Application, "{code}");
            }
        }
    }

    #[test]
    fn confined_xids_match_csv() {
        let table = Table::built_in();
        for code in [13, 46, 48, 62, 142, 171] {
            assert!(table.is_contained(code), "{code}");
        }
        for code in [54, 74, 79, 95, 119, 167, 4711] {
            assert!(!table.is_contained(code), "{code}");
        }
        for code in [48, 63, 64, 92, 94, 95, 154, 171] {
            assert!(table.has_state(code), "{code}");
        }
        for code in [13, 31, 43, 74, 79] {
            assert!(!table.has_state(code), "{code}");
        }
    }

    #[test]
    fn class_is_found_by_name() {
        for class in [Class::Fatal, Class::Resettable, Class::MigInstance, Class::Application] {
            assert_eq!(Class::named(&class.to_string()), Some(class));
        }
        assert_eq!(Class::named("link"), Some(Class::Link { reset: true }));
        assert_eq!(Class::named("haunted"), None);
    }

    #[test]
    fn response_is_that_of_a_fault() {
        let table = Table::built_in();
        assert!(table.response(79).is_some_and(|text| text.contains("reboot")));
        assert!(table.response(48).is_some_and(|text| text.contains("reset")));
        assert_eq!(table.response(13), None);
        assert!(table.response(4711).is_some_and(|text| text.contains("reset")));
    }

    #[test]
    fn xid_is_described() {
        let table = Table::built_in();
        assert_eq!(table.describe(79), "Xid 79: GPU has fallen off the bus");
        assert_eq!(table.describe(167), "Xid 167: PCIE_FATAL_TIMEOUT");
        assert_eq!(table.describe(18), "Xid 18: unexpected, NVIDIA lists it as unused");
        assert_eq!(table.describe(176), "Xid 176: PCIE_CORRECTABLE_ERROR_FAULT");
        assert_eq!(table.describe(4711), "Xid 4711: unknown to this version");
    }
}
