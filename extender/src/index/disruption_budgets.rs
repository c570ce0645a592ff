//! PodDisruptionBudgets: how many pods may be stopped now. A gang is preempted as a whole only if budgets allow the
//! whole, or a part of it would be evicted in vain; so budgets are checked before the first eviction. For a single pod
//! kube-scheduler breaks budgets where nothing else helps, so the broken ones are counted.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use gantry_gang::needs::{Operator, Requirement};
use gantry_planner::preempt::{Budget, VictimCandidate};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize;
use serde_json::Value;

use super::node_resources_table::NodeResourcesTable;
use crate::partial_object::PartialObject;
use crate::pod::PodProfile;

/// A budget as it is watched: one that cannot be parsed must not block the others.
pub type PartialBudget = PartialObject<PodDisruptionBudget>;

/// A budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disruptions {
    /// Namespace of its pods.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// The requirements on labels of its pods; `None` selects no pod.
    pub selector: Option<Vec<Requirement>>,
    /// `status.disruptionsAllowed`; 0 while unknown.
    pub allowed: u32,
}

impl Disruptions {
    /// Reads a budget. One whose selector cannot be read protects every pod of its namespace: a pod too many is spared.
    pub fn read(budget: &PartialBudget) -> Self {
        let selector = budget.spec.get("selector").filter(|selector| !selector.is_null());
        let selector = selector.map(LabelSelector::deserialize);
        let readable = !matches!(selector, Some(Err(_)));
        let allowed = budget.status.as_ref().and_then(|status| status.get("disruptionsAllowed"));
        let allowed = allowed.and_then(Value::as_u64).filter(|_| readable);
        Self {
            namespace: budget.metadata.namespace.as_deref().unwrap_or_default().into(),
            name: budget.metadata.name.as_deref().unwrap_or_default().into(),
            selector: selector.map(|selector| requirements(&selector.unwrap_or_default())),
            allowed: allowed.and_then(|allowed| u32::try_from(allowed).ok()).unwrap_or(0),
        }
    }

    fn covers(&self, namespace: &str, labels: &BTreeMap<Arc<str>, Arc<str>>) -> bool {
        let Some(selector) = &self.selector else {
            return false;
        };
        *self.namespace == *namespace
            && selector.iter().all(|required| required.holds(labels.get(&required.key)))
    }
}

/// An unknown operator covers every pod: a pod too many is spared.
fn requirements(selector: &LabelSelector) -> Vec<Requirement> {
    let equal = selector.match_labels.iter().flatten().map(|(key, value)| Requirement {
        key: key.as_str().into(),
        operator: Operator::In,
        values: vec![value.as_str().into()],
    });
    let expressions = selector.match_expressions.iter().flatten().filter_map(|expression| {
        Some(Requirement {
            key: expression.key.as_str().into(),
            operator: match expression.operator.as_str() {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::DoesNotExist,
                _ => return None,
            },
            values: expression.values.iter().flatten().map(|value| value.as_str().into()).collect(),
        })
    });
    equal.chain(expressions).collect()
}

/// Whether a pod that no budget allowed to be stopped before perhaps can be stopped now.
fn allows_more(before: Option<&[Disruptions]>, now: Option<&[Disruptions]>) -> bool {
    let (Some(before), Some(now)) = (before, now) else {
        return now.is_some();
    };
    let now: HashMap<_, _> = now.iter().map(|budget| ((&budget.namespace, &budget.name), budget)).collect();
    before.iter().any(|before| {
        let now = now.get(&(&before.namespace, &before.name));
        now.is_none_or(|now| now.allowed > before.allowed || now.selector != before.selector)
    })
}

/// The disruption budgets of the cluster; unknown until they are listed. A cluster without a budget watch has none.
#[derive(Debug)]
pub(super) struct DisruptionBudgets(Option<Vec<Disruptions>>);

impl Default for DisruptionBudgets {
    fn default() -> Self {
        Self(Some(Vec::new()))
    }
}

impl DisruptionBudgets {
    /// Replaces the budgets; `None` while they are unknown. True if a pod that was protected perhaps no longer is.
    pub(super) fn set(&mut self, budgets: Option<Vec<Disruptions>>) -> bool {
        let more = self.0 != budgets && allows_more(self.0.as_deref(), budgets.as_deref());
        self.0 = budgets;
        more
    }

    pub(super) fn are_known(&self) -> bool {
        self.0.is_some()
    }

    /// What the budgets allow now.
    pub(super) fn allowance(&self) -> Allowance<'_> {
        let left = |all: &Vec<Disruptions>| all.iter().map(|budget| budget.allowed).collect();
        Allowance { budgets: self, left: self.0.as_ref().map(left) }
    }

    /// A search for the budgets that cover pods. `profiles` has the profiles of the pods.
    pub(super) fn coverage<'i>(&'i self, profiles: &'i NodeResourcesTable) -> Coverage<'i> {
        Coverage { budgets: self.0.as_deref().unwrap_or_default(), profiles, by_profile: HashMap::new() }
    }
}

/// What budgets still allow while pods are chosen to be stopped, one after the other.
#[derive(Debug, Clone)]
pub(super) struct Allowance<'i> {
    budgets: &'i DisruptionBudgets,
    /// By budget; `None` while they are unknown: then every pod counts as protected.
    left: Option<Vec<u32>>,
}

impl Allowance<'_> {
    /// One more pod is to be stopped. Whether a budget that covers it does not allow that.
    pub(super) fn breaks(&mut self, profile: Option<&PodProfile>) -> bool {
        let (Some(left), Some(budgets)) = (&mut self.left, &self.budgets.0) else {
            return true;
        };
        let Some(profile) = profile else {
            return false;
        };
        let mut breaks = false;
        for (budget, left) in budgets.iter().zip(left) {
            if budget.covers(&profile.namespace, &profile.labels) {
                breaks |= *left == 0;
                *left = left.saturating_sub(1);
            }
        }
        breaks
    }
}

/// Finds the budgets that cover pods. Pods of one profile are looked up once: there are many.
pub(super) struct Coverage<'i> {
    budgets: &'i [Disruptions],
    profiles: &'i NodeResourcesTable,
    /// The numbers of the budgets.
    by_profile: HashMap<*const PodProfile, Vec<usize>>,
}

impl Coverage<'_> {
    fn of(&mut self, profile: &PodProfile) -> &[usize] {
        let budgets = self.budgets;
        self.by_profile.entry(std::ptr::from_ref(profile)).or_insert_with(|| {
            let covering = budgets.iter().enumerate();
            covering
                .filter(|(_, budget)| budget.covers(&profile.namespace, &profile.labels))
                .map(|(number, _)| number)
                .collect()
        })
    }

    /// What the end of a unit needs of budgets. Budgets that cover a pod together allow nothing: the API server refuses
    /// to evict a pod that several budgets cover, whatever they allow.
    pub(super) fn need(&mut self, unit: &VictimCandidate) -> Vec<Budget> {
        let (profiles, budgets) = (self.profiles, self.budgets);
        let mut needed: BTreeMap<Vec<usize>, Vec<u32>> = BTreeMap::new();
        for (number, pod) in (0u32..).zip(&unit.pods) {
            let covering = profiles.profile(&pod.uid).map(|profile| self.of(profile));
            if let Some(covering) = covering.filter(|covering| !covering.is_empty()) {
                needed.entry(covering.to_vec()).or_default().push(number);
            }
        }
        let budget = |(covering, pods): (Vec<usize>, Vec<u32>)| {
            let covering = covering.iter().filter_map(|number| budgets.get(*number));
            let names: Vec<String> =
                covering.clone().map(|budget| format!("{}/{}", budget.namespace, budget.name)).collect();
            let allowed = match covering.collect::<Vec<_>>()[..] {
                [one] => one.allowed,
                _ => 0,
            };
            Budget { name: names.join(" and ").into(), allowed, pods }
        };
        needed.into_iter().map(budget).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{Cluster, bound, plain, pod};
    use gantry_gang::Resources;
    use gantry_planner::decide::Options;
    use gantry_planner::preempt::CandidatePod;
    use gantry_planner::snapshot::NodeIx;
    use serde_json::{Value, json};

    fn budget(selector: &Value) -> Disruptions {
        let mut spec = json!({"minAvailable": 1});
        if !selector.is_null() {
            spec["selector"] = selector.clone();
        }
        let object = json!({
            "metadata": {"namespace": "default", "name": "b"},
            "spec": spec,
            "status": {"disruptionsAllowed": 2, "currentHealthy": 3, "desiredHealthy": 1, "expectedPods": 3},
        });
        Disruptions::read(&serde_json::from_value(object).unwrap())
    }

    fn covers(selector: &Value, namespace: &str, labels: &[(&str, &str)]) -> bool {
        let labels = labels.iter().map(|(key, value)| (Arc::from(*key), Arc::from(*value))).collect();
        budget(selector).covers(namespace, &labels)
    }

    #[test]
    fn malformed_selector_protects_the_whole_namespace() {
        let unreadable = json!({"matchLabels": {"app": 3}});
        assert_eq!(budget(&unreadable).allowed, 0);
        assert!(covers(&unreadable, "default", &[("app", "db")]));
        assert!(!covers(&unreadable, "other", &[("app", "db")]));
    }

    #[test]
    fn budget_covers_selected_pods_of_its_namespace() {
        let web = json!({"matchLabels": {"app": "web"}});
        assert!(covers(&web, "default", &[("app", "web"), ("x", "y")]));
        assert!(!covers(&web, "other", &[("app", "web")]));
        assert!(!covers(&web, "default", &[("app", "db")]));
        let either = json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web", "db"]}]});
        assert!(covers(&either, "default", &[("app", "db")]));
        assert!(!covers(&either, "default", &[]));
    }

    #[test]
    fn empty_selector_covers_all_and_no_selector_none() {
        assert!(covers(&json!({}), "default", &[]));
        assert!(!covers(&Value::Null, "default", &[]));
        assert_eq!(budget(&json!({})).allowed, 2);
    }

    #[test]
    fn pod_covered_by_two_budgets_is_not_evictable() {
        let cluster = Cluster::new(Options::default());
        cluster.add("n", &plain(2));
        for (name, app) in [("once", "web"), ("twice", "db")] {
            let mut pod = pod(name, 1);
            pod["metadata"]["labels"] = json!({"app": app});
            cluster.pod(&bound(pod, "n", 1, None));
        }
        let (all, db) = (budget(&json!({})), budget(&json!({"matchLabels": {"app": "db"}})));
        let budgets = vec![all, Disruptions { name: "db".into(), ..db }];
        cluster.store.update(|index| index.budgets_seen(Some(budgets)));
        let allowed = |uid: &str| {
            let pod = CandidatePod {
                uid: uid.into(),
                node: NodeIx(0),
                devices: Vec::new(),
                numa: Vec::new(),
                resources: Resources::default(),
                role: 0,
            };
            let unit = VictimCandidate { pods: vec![pod], ..VictimCandidate::default() };
            let needed =
                cluster.store.read(|index| index.facts.budgets.coverage(&index.facts.resources).need(&unit));
            needed.into_iter().map(|budget| budget.allowed).collect::<Vec<_>>()
        };
        assert_eq!((allowed("once"), allowed("twice")), (vec![2], vec![0]));
    }
}
