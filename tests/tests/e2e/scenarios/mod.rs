//! The scenarios, each a story of its own: what is there, what happens, what must hold.

mod bypass;
mod churn;
mod failures;
mod gangs;
mod gangs_commit;
mod gangs_dialects;
mod gangs_failures;
mod gangs_input;
mod gangs_leave;
mod gangs_levels;
mod gangs_lost;
mod gangs_native;
mod gangs_near;
mod gangs_nodes;
mod gangs_owned;
mod gangs_preempt;
mod gangs_schedulers;
mod gangs_states;
mod gangs_stuck;
mod gangs_told;
mod guard;
mod modes;
mod node_changes;
mod node_config;
mod placement;
mod shapes;
mod smoke;
mod stock;
mod ways;

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
        smoke::what_containers_write_and_kubelet_says_can_be_read,
        smoke::simulated_gpus_lie_on_their_nodes,
        smoke::a_restarted_kubelet_keeps_its_pods,
        smoke::a_killed_api_server_loses_nothing,
        stock::a_pod_without_gpus_runs_while_the_extender_is_down,
        guard::lets_nobody_but_the_extender_write_a_grant,
        guard::a_plugin_changes_of_its_node_what_it_is_for_and_nothing_else,
        placement::requests_land_on_the_best_node_and_set,
        placement::a_request_that_fits_nowhere_says_why_in_gpu_words,
        placement::device_nodes_reach_the_container_by_node_and_by_cdi,
        shapes::containers_share_what_the_pod_was_granted,
        bypass::a_pod_that_names_its_node_is_kept_off_reserved_devices,
        churn::three_hundred_pods_come_and_go,
        failures::a_force_deleted_pods_devices_are_not_given_out_while_it_lives,
        failures::the_plugin_is_killed_during_admission,
        failures::kubelet_is_restarted_under_running_pods,
        failures::the_extender_is_killed_again_and_again,
        failures::the_api_server_is_away_for_a_while,
        modes::replicas_of_one_gpu_go_to_several_pods,
        modes::slices_of_each_profile_are_resources_of_their_own,
        modes::slices_all_alike_are_gpus,
        modes::parts_of_a_slice_are_resources_of_their_own,
        modes::a_changed_config_is_taken_up_and_a_bad_one_is_not,
        node_config::a_label_chooses_a_configuration_of_the_config_map,
        node_config::labels_are_written_on_the_node_or_into_its_node_feature,
        node_changes::a_gpu_cut_anew_is_other_resources,
        node_changes::an_xid_is_seen_wherever_people_look_until_it_is_lifted,
        node_changes::a_quarantine_outlives_its_plugin_while_the_api_server_is_away,
        ways::devices_reach_the_container_by_every_strategy,
        ways::kubelet_counts_uuids_where_containers_see_indices,
        ways::a_node_has_whole_gpus_beside_shared_ones,
        ways::slices_are_shared_too,
        ways::what_goes_with_gpus_comes_where_it_is_asked_for,
        stock::a_pod_without_gpus_is_never_touched,
        gangs::of_two_that_need_most_of_the_cluster_one_runs_and_one_waits,
        gangs::larger_than_the_cluster_is_refused_with_its_arithmetic,
        gangs::a_stream_of_single_pods_does_not_starve_one,
        gangs::waits_for_members_that_do_not_exist_yet,
        gangs::with_our_gate_is_not_even_seen_before_it_is_complete,
        gangs::a_member_that_never_arrives_does_not_hold_places_for_ever,
        gangs_told::what_becomes_of_them_is_told_wherever_people_look,
        gangs_lost::while_queued_or_at_the_barrier,
        gangs_lost::after_it_was_bound_its_place_is_kept_or_given_up,
        gangs_lost::after_it_was_bound_all_of_it_is_started_anew,
        gangs_lost::with_its_namespace_wherever_it_is,
        gangs_leave::while_it_backs_off_and_while_it_is_invalid,
        gangs_leave::while_others_have_to_go_for_it_and_while_it_is_repaired,
        gangs_leave::while_its_decision_is_being_written,
        gangs_commit::kubelets_die_the_extender_is_updated_and_a_node_is_lost_before_it_is_written,
        gangs_leave::while_it_is_bound_and_whoever_binds_it_is_killed,
        gangs_preempt::a_gang_takes_the_place_of_another_as_a_whole_unless_a_budget_protects_it,
        gangs_preempt::a_single_pod_preempts_by_the_scheduler_and_breaks_no_gang_for_it,
        gangs_failures::the_extender_and_the_scheduler_are_killed_with_gangs_in_every_state,
        gangs_failures::kubelets_are_killed_with_gangs_in_every_state,
        gangs_states::what_passes_otherwise_outlives_whoever_is_killed,
        gangs_states::what_passes_otherwise_outlives_an_update_of_the_extender,
        gangs_failures::the_extender_is_killed_while_a_gang_is_being_bound,
        gangs_failures::a_node_is_lost_between_plan_and_decision,
        gangs_failures::kubelet_is_away_while_a_gang_is_bound_to_its_node,
        gangs_failures::a_node_is_deleted_under_a_bound_gang,
        gangs_nodes::a_node_is_lost_while_a_gang_is_being_bound_to_it,
        gangs_nodes::a_node_is_lost_where_others_have_to_go_for_a_gang_and_another_is_repaired,
        gangs_failures::two_extenders_take_over_from_each_other,
        gangs_input::that_cannot_be_followed_is_named_on_the_gang_and_its_pods,
        gangs_input::of_people_goes_first_and_changes_nothing_that_runs,
        gangs_levels::a_gang_lies_as_its_level_its_slices_and_its_ranks_ask,
        gangs_near::members_that_must_be_near_a_sibling_come_after_it,
        gangs_native::pod_groups_of_kubernetes_are_gangs,
        gangs_native::pod_groups_are_gangs_also_where_kube_scheduler_tries_them_as_a_whole,
        gangs_stuck::of_two_gangs_that_hold_what_the_other_lacks_one_gives_way,
        gangs_schedulers::gangs_of_another_scheduler_keep_nothing_until_it_asks,
        gangs_schedulers::pods_of_a_basic_group_go_one_by_one,
        gangs_dialects::pods_with_the_marks_of_other_schedulers_are_gangs,
        gangs_dialects::a_stateful_set_is_one_where_it_makes_its_pods_in_parallel,
        gangs_owned::pods_as_other_controllers_leave_them_are_gangs,
        gangs_dialects::controllers_make_gangs_without_knowing_of_it,
    ]
}
