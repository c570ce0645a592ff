//! The scenarios, each a story of its own: what is there, what happens, what must hold.

mod smoke;
mod stock;

use std::pin::Pin;

use anyhow::Result;

use crate::bed::Bed;

type Outcome<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// One scenario.
pub(crate) struct Scenario {
    /// What it says, as test runners print it.
    pub(crate) name: &'static str,
    story: fn(&Bed) -> Outcome<'_>,
}

impl Scenario {
    /// Plays it.
    pub(crate) async fn run(&self, bed: &Bed) -> Result<()> {
        (self.story)(bed).await
    }
}

/// Names a scenario after its module and function.
macro_rules! scenarios {
    ($($module:ident :: $name:ident),* $(,)?) => {
        vec![$(Scenario {
            name: concat!(stringify!($module), "::", stringify!($name)),
            story: |bed| Box::pin($module::$name(bed)),
        }),*]
    };
}

/// All of them, in the order they are played: first those that need no daemon of ours.
pub(crate) fn all() -> Vec<Scenario> {
    scenarios![
        smoke::a_plain_pod_runs_on_each_node,
        smoke::a_restarted_kubelet_keeps_its_pods,
        smoke::a_killed_api_server_loses_nothing,
        stock::a_pod_without_gpus_runs_while_the_extender_is_down,
    ]
}
