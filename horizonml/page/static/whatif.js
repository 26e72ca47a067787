// Asks the planner what another device or link would change.
export class WhatIf { constructor(card) { this.card = card; } set(run) {} }
